// A recorded list of kernel calls, replayed in one native call: the CPU's twin of a CUDA graph.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace pf {

// Not thread-safe: one thread records, then one thread at a time runs.
class Program {
  public:
    using Call = std::function<void(const Ctx&, std::int64_t rows)>;

    Program(std::shared_ptr<Team> team, Isa isa) : team_(std::move(team)), isa_(isa) {}

    // Appends a call; kind names it in the profile.
    void add(std::string kind, Call call);
    // Appends a linear layer whose first weights are fetched while the calls before it finish.
    void add_linear(Call call, const PackedLinear& weight);

    // Calls everything in order on all threads, with a barrier after each call.
    void run(std::int64_t rows);

    std::size_t size() const { return commands_.size(); }
    int num_threads() const { return team_->num_threads(); }

    // Wall time of all runs.
    std::int64_t native_ns() const { return native_ns_; }
    // Wall time by kind since profiling was last switched on, barriers included.
    std::map<std::string, std::int64_t> profile_ns() const;
    void set_profile(bool on);

  private:
    struct Command {
        Call call;
        std::string kind;
        const PackedLinear* prefetch = nullptr;  // weights of the next linear layer, if this command precedes it
    };

    struct alignas(64) WorkCounter {
        std::atomic<std::int64_t> value{0};
    };

    void run_thread(int tid, std::int64_t rows);

    std::shared_ptr<Team> team_;
    Isa isa_;
    std::vector<Command> commands_;
    std::vector<std::int64_t> command_ns_;
    WorkCounter next_work_[2];  // of the running command, and of the one after it
    std::int64_t native_ns_ = 0;
    bool profile_ = false;
};

}  // namespace pf
