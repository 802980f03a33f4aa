#include "program.h"

#include <chrono>
#include <utility>

#include "linear.h"

namespace pf {
namespace {

std::int64_t now_ns() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

void Program::add(std::string kind, Call call) {
    commands_.push_back({std::move(call), std::move(kind), nullptr});
    command_ns_.push_back(0);
}

void Program::add_linear(Call call, const PackedLinear& weight) {
    if (!commands_.empty()) commands_.back().prefetch = &weight;
    add("linear", std::move(call));
}

void Program::run(std::int64_t rows) {
    const std::int64_t start = now_ns();
    next_work_[0].value.store(team_->num_threads(), std::memory_order_relaxed);
    team_->run([this, rows](int tid) { run_thread(tid, rows); });
    native_ns_ += now_ns() - start;
}

void Program::run_thread(int tid, std::int64_t rows) {
    Barrier& barrier = team_->barrier();
    Ctx ctx{isa_, tid, team_->num_threads(), &barrier, nullptr};
    const bool timed = profile_ && tid == 0;
    std::int64_t start = timed ? now_ns() : 0;
    for (std::size_t i = 0; i < commands_.size(); ++i) {
        const Command& command = commands_[i];
        ctx.next_work = &next_work_[i % 2].value;
        // No thread has used the other counter since the last barrier, and none will before the next one.
        if (tid == 0) next_work_[(i + 1) % 2].value.store(ctx.num_threads, std::memory_order_relaxed);
        command.call(ctx, rows);
        if (i + 1 == commands_.size()) break;  // the team's join is the last barrier
        if (command.prefetch == nullptr) {
            barrier.wait();
        } else {
            LinearPrefetch prefetch(ctx, rows, *command.prefetch);
            barrier.wait([&prefetch] { prefetch.some(); });
        }
        if (timed) {
            const std::int64_t end = now_ns();
            command_ns_[i] += end - start;
            start = end;
        }
    }
    if (timed && !commands_.empty()) command_ns_.back() += now_ns() - start;
}

std::map<std::string, std::int64_t> Program::profile_ns() const {
    std::map<std::string, std::int64_t> total;
    for (std::size_t i = 0; i < commands_.size(); ++i) total[commands_[i].kind] += command_ns_[i];
    return total;
}

void Program::set_profile(bool on) {
    profile_ = on;
    if (on) command_ns_.assign(commands_.size(), 0);
}

}  // namespace pf
