// The Python module pilotfish._native. Tensors come in as raw addresses: an ndarray argument costs 2 to 3 microseconds,
// an int 0.1. The Python side (pilotfish.ops.native, pilotfish.attention.native) checks shapes and keeps memory alive.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "kernels.h"
#include "memory.h"
#include "program.h"
#include "team.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pf;

namespace {

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_from(const std::string& name) {
    if (name == "float32") return DType::f32;
    if (name == "bfloat16") return DType::bf16;
    throw std::invalid_argument("dtype '" + name + "': must be float32 or bfloat16");
}

std::vector<std::string> supported_isa_names() {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
    return names;
}

Isa supported_isa(const std::string& name) {
    std::string allowed;
    for (const Isa isa : supported_isas()) {
        if (name == isa_name(isa)) return isa;
        allowed += std::string(allowed.empty() ? "" : ", ") + isa_name(isa);
    }
    throw std::invalid_argument("isa '" + name + "': this machine runs " + (allowed.empty() ? "none" : allowed));
}

std::shared_ptr<Team> make_team(int num_threads, int spin_us) {
    if (num_threads < 1 || spin_us < 0) {
        throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ", spin_us=" +
                                    std::to_string(spin_us) + ": at least 1 thread and 0 microseconds");
    }
    return std::make_shared<Team>(num_threads, spin_us);
}

void bind_memory(nb::module_& m) {
    nb::class_<Team>(m, "Team")
        .def(nb::new_(&make_team), "num_threads"_a, "spin_us"_a = 100)
        .def_prop_ro("num_threads", &Team::num_threads);

    nb::class_<HugeBuffer>(m, "HugeBuffer")
        .def(nb::init<std::size_t>(), "num_bytes"_a)
        .def_prop_ro("address", [](const HugeBuffer& b) { return reinterpret_cast<Address>(b.data()); })
        .def_prop_ro("num_bytes", &HugeBuffer::size)
        .def("array", [](nb::handle self) {
            const auto& buffer = nb::cast<const HugeBuffer&>(self);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(buffer.data(), {buffer.size()}, self);
        });

    m.def("read_all", &read_all, "team"_a, "buffer"_a, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<Arena>(m, "Arena").def(nb::init<>());

    nb::class_<OwnedLinear>(m, "PackedLinear")
        .def_prop_ro("n", [](const OwnedLinear& w) { return w.view.n; })
        .def_prop_ro("k", [](const OwnedLinear& w) { return w.view.k; });

    m.def(
        "pack_linear",
        [](Arena& arena, Team& team, Address source, const std::string& src_dtype, std::int64_t n, std::int64_t k,
           std::int64_t row_stride, const std::string& dst_dtype, Address bias) {
            const DType from = dtype_from(src_dtype), to = dtype_from(dst_dtype);
            nb::gil_scoped_release release;
            return pack_linear(arena, team, at(source), from, n, k, row_stride, to, at<const float>(bias));
        },
        "arena"_a, "team"_a, "source"_a, "src_dtype"_a, "n"_a, "k"_a, "row_stride"_a, "dst_dtype"_a, "bias"_a = 0);
}

void bind_attention(nb::module_& m) {
    nb::class_<Batch>(m, "Batch")
        .def(nb::init<>())
        .def(
            "set_arrays",
            [](Batch& b, Address positions, Address slots, Address query_start, Address kv_len, Address page_start,
               Address pages) {
                b.positions = at<const std::int32_t>(positions);
                b.slots = at<const std::int32_t>(slots);
                b.query_start = at<const std::int32_t>(query_start);
                b.kv_len = at<const std::int32_t>(kv_len);
                b.page_start = at<const std::int32_t>(page_start);
                b.pages = at<const std::int32_t>(pages);
            },
            "positions"_a, "slots"_a, "query_start"_a, "kv_len"_a, "page_start"_a, "pages"_a)
        .def(
            "set_tree",
            [](Batch& b, Address mask, int words) {
                b.tree_mask = at<const std::uint64_t>(mask);
                b.tree_words = words;
            },
            "mask"_a, "words"_a)
        .def(
            "set_size",
            [](Batch& b, int num_tokens, int num_seqs) {
                b.num_tokens = num_tokens;
                b.num_seqs = num_seqs;
            },
            "num_tokens"_a, "num_seqs"_a);

    nb::class_<KVLayer>(m, "KVLayer")
        .def(
            "__init__",
            [](KVLayer* self, const std::string& dtype, int num_q_heads, int num_kv_heads, int head_dim, int d_pad,
               int page_size, Address k, Address v, int first_key) {
                if (first_key != 0 && first_key != 1) {
                    throw std::invalid_argument("first_key=" + std::to_string(first_key) + ": must be 0 or 1");
                }
                new (self) KVLayer{dtype_from(dtype), num_q_heads, num_kv_heads, head_dim, d_pad, page_size,
                                   at(k), at(v), first_key};
            },
            "dtype"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "d_pad"_a, "page_size"_a, "k"_a, "v"_a,
            "first_key"_a = 0);

    m.def("attention_scratch_bytes", &attention_scratch_bytes, "layer"_a, "max_tokens"_a, "max_seqs"_a, "max_kv_len"_a,
          "num_threads"_a);
}

std::vector<Columns> columns(const std::vector<Address>& xs, const std::vector<std::int64_t>& strides,
                             const std::vector<int>& dims) {
    if (strides.size() != xs.size() || dims.size() != xs.size()) {
        throw std::invalid_argument("concat got " + std::to_string(xs.size()) + " tensors, " +
                                    std::to_string(strides.size()) + " strides and " + std::to_string(dims.size()) +
                                    " widths: must be equally many");
    }
    std::vector<Columns> parts;
    for (std::size_t i = 0; i < xs.size(); ++i) parts.push_back({at(xs[i]), strides[i], dims[i]});
    return parts;
}

// Row-wise kernels of models.
void bind_model_commands(nb::class_<Program>& program) {
    program
        .def(
            "linear",
            [](Program& p, Address x, std::int64_t x_stride, std::shared_ptr<OwnedLinear> w, Address y,
               std::int64_t y_stride, const std::string& y_dtype) {
                const DType to = dtype_from(y_dtype);
                const PackedLinear& view = w->view;
                p.add_linear(
                    [=](const Ctx& ctx, std::int64_t rows) {
                        linear(ctx, rows, at(x), x_stride, w->view, at(y), y_stride, to);
                    },
                    view);
            },
            "x"_a, "x_stride"_a, "weight"_a, "y"_a, "y_stride"_a, "y_dtype"_a)
        .def(
            "embedding",
            [](Program& p, Address token_ids, std::shared_ptr<OwnedLinear> table, Address out, std::int64_t out_stride) {
                p.add("embedding", [=](const Ctx& ctx, std::int64_t rows) {
                    embedding(ctx, rows, at<const std::int32_t>(token_ids), table->view, at(out), out_stride);
                });
            },
            "token_ids"_a, "table"_a, "out"_a, "out_stride"_a)
        .def(
            "rms_norm",
            [](Program& p, const std::string& dtype, Address x, std::int64_t x_stride, Address w, Address out,
               std::int64_t out_stride, int groups, int dim, float eps) {
                p.add("rms_norm", [=, type = dtype_from(dtype)](const Ctx& ctx, std::int64_t rows) {
                    rms_norm(ctx, rows, type, at(x), x_stride, at(w), at(out), out_stride, groups, dim, eps);
                });
            },
            "dtype"_a, "x"_a, "x_stride"_a, "weight"_a, "out"_a, "out_stride"_a, "groups"_a, "dim"_a, "eps"_a)
        .def(
            "add_rms_norm",
            [](Program& p, const std::string& dtype, Address x, std::int64_t x_stride, Address residual,
               std::int64_t residual_stride, Address w, Address out, std::int64_t out_stride, int dim, float eps) {
                p.add("rms_norm", [=, type = dtype_from(dtype)](const Ctx& ctx, std::int64_t rows) {
                    add_rms_norm(ctx, rows, type, at(x), x_stride, at(residual), residual_stride, at(w), at(out),
                                 out_stride, dim, eps);
                });
            },
            "dtype"_a, "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "weight"_a, "out"_a, "out_stride"_a,
            "dim"_a, "eps"_a)
        .def(
            "add",
            [](Program& p, const std::string& dtype, Address x, std::int64_t x_stride, Address residual,
               std::int64_t residual_stride, Address out, std::int64_t out_stride, int dim) {
                p.add("add", [=, type = dtype_from(dtype)](const Ctx& ctx, std::int64_t rows) {
                    add(ctx, rows, type, at(x), x_stride, at(residual), residual_stride, at(out), out_stride, dim);
                });
            },
            "dtype"_a, "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "out"_a, "out_stride"_a, "dim"_a)
        .def(
            "concat",
            [](Program& p, const std::string& dtype, const std::vector<Address>& xs,
               const std::vector<std::int64_t>& x_strides, const std::vector<int>& dims, Address out,
               std::int64_t out_stride) {
                p.add("concat", [=, type = dtype_from(dtype), parts = columns(xs, x_strides, dims)](
                                    const Ctx& ctx, std::int64_t rows) {
                    concat(ctx, rows, type, parts, at(out), out_stride);
                });
            },
            "dtype"_a, "xs"_a, "x_strides"_a, "dims"_a, "out"_a, "out_stride"_a)
        .def(
            "silu_mul",
            [](Program& p, const std::string& dtype, Address gate_up, std::int64_t stride, Address out,
               std::int64_t out_stride, int dim) {
                p.add("silu_mul", [=, type = dtype_from(dtype)](const Ctx& ctx, std::int64_t rows) {
                    silu_mul(ctx, rows, type, at(gate_up), stride, at(out), out_stride, dim);
                });
            },
            "dtype"_a, "gate_up"_a, "stride"_a, "out"_a, "out_stride"_a, "dim"_a)
        .def(
            "gather_rows",
            [](Program& p, const std::string& dtype, Address x, std::int64_t x_stride, Address index, Address out,
               std::int64_t out_stride, int dim) {
                p.add("gather_rows", [=, type = dtype_from(dtype)](const Ctx& ctx, std::int64_t rows) {
                    gather_rows(ctx, rows, type, at(x), x_stride, at<const std::int32_t>(index), at(out), out_stride, dim);
                });
            },
            "dtype"_a, "x"_a, "x_stride"_a, "index"_a, "out"_a, "out_stride"_a, "dim"_a);
}

// Kernels that read a Batch and KV pages (kept alive by the caller), and the sampler's.
void bind_other_commands(nb::class_<Program>& program) {
    program
        .def(
            "rope_append",
            [](Program& p, const Batch& batch, const KVLayer& layer, Address q, std::int64_t q_stride, Address k,
               std::int64_t k_stride, Address v, std::int64_t v_stride, Address cos, Address sin) {
                p.add("rope_append", [=, b = &batch, l = &layer](const Ctx& ctx, std::int64_t) {
                    rope_append(ctx, *b, *l, at(q), q_stride, at(k), k_stride, at(v), v_stride, at<const float>(cos),
                                at<const float>(sin));
                });
            },
            "batch"_a, "layer"_a, "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "cos"_a, "sin"_a)
        .def(
            "attention",
            [](Program& p, const Batch& batch, const KVLayer& layer, Address q, std::int64_t q_stride, Address out,
               std::int64_t out_stride, float scale, Address scratch) {
                p.add("attention", [=, b = &batch, l = &layer](const Ctx& ctx, std::int64_t) {
                    attention(ctx, *b, *l, at(q), q_stride, at(out), out_stride, scale, at(scratch));
                });
            },
            "batch"_a, "layer"_a, "q"_a, "q_stride"_a, "out"_a, "out_stride"_a, "scale"_a, "scratch"_a)
        .def(
            "copy_slots",
            [](Program& p, const KVLayer& layer, Address source, Address target) {
                p.add("copy_slots", [=, l = &layer](const Ctx& ctx, std::int64_t rows) {
                    copy_slots(ctx, *l, at<const std::int32_t>(source), at<const std::int32_t>(target), rows);
                });
            },
            "layer"_a, "source"_a, "target"_a)
        .def(
            "argmax",
            [](Program& p, Address logits, std::int64_t stride, int vocab, Address out) {
                p.add("argmax", [=](const Ctx& ctx, std::int64_t rows) {
                    argmax(ctx, rows, at<const float>(logits), stride, vocab, at<std::int32_t>(out));
                });
            },
            "logits"_a, "stride"_a, "vocab"_a, "out"_a)
        .def(
            "noise_argmax",
            [](Program& p, Address logits, std::int64_t stride, int vocab, Address inv_temperature, Address seeds,
               Address sample_indices, Address positions, Address out) {
                p.add("argmax", [=](const Ctx& ctx, std::int64_t rows) {
                    noise_argmax(ctx, rows, at<const float>(logits), stride, vocab, at<const float>(inv_temperature),
                                 at<const std::uint64_t>(seeds), at<const std::int32_t>(sample_indices),
                                 at<const std::int32_t>(positions), at<std::int32_t>(out));
                });
            },
            "logits"_a, "stride"_a, "vocab"_a, "inv_temperature"_a, "seeds"_a, "sample_indices"_a, "positions"_a,
            "out"_a);
}

}  // namespace

NB_MODULE(_native, m) {
    // Tensors over our buffers that are alive when the interpreter ends are not leaks worth a page of warnings.
    nb::set_leak_warnings(false);
    m.doc() = "Pilotfish's CPU kernels, and the programs that replay them.";
    m.def("supported_isas", &supported_isa_names);
    m.def("fast_dpbf16", &fast_dpbf16);
    bind_memory(m);
    bind_attention(m);

    nb::class_<Program> program(m, "Program");
    program
        .def(
            "__init__",
            [](Program* self, std::shared_ptr<Team> team, const std::string& isa) {
                new (self) Program(std::move(team), supported_isa(isa));
            },
            "team"_a, "isa"_a)
        .def("run", &Program::run, "rows"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("__len__", &Program::size)
        .def_prop_ro("native_ns", &Program::native_ns)
        .def_prop_ro("profile_ns", &Program::profile_ns)
        .def("set_profile", &Program::set_profile, "on"_a);
    bind_model_commands(program);
    bind_other_commands(program);
}
