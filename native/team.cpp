#include "team.h"

#include <chrono>

namespace pf {

Team::Team(int num_threads, int spin_us) : num_threads_(num_threads), spin_us_(spin_us), barrier_(num_threads) {
    workers_.reserve(static_cast<std::size_t>(num_threads - 1));
    for (int tid = 1; tid < num_threads; ++tid) workers_.emplace_back([this, tid] { work(tid); });
}

Team::~Team() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Team::run(const std::function<void(int)>& job) {
    const std::lock_guard lock(mutex_);
    if (num_threads_ == 1) {
        job(0);
        return;
    }
    job_ = &job;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    job(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < 4000) spin_pause();
        else std::this_thread::yield();
    }
}

void Team::work(int tid) {
    using Clock = std::chrono::steady_clock;
    std::uint32_t seen = 0;
    for (;;) {
        const auto deadline = Clock::now() + std::chrono::microseconds(spin_us_);
        while (epoch_.load(std::memory_order_acquire) == seen) {
            for (int i = 0; i < 32 && epoch_.load(std::memory_order_relaxed) == seen; ++i) spin_pause();
            if (Clock::now() >= deadline) epoch_.wait(seen, std::memory_order_acquire);
        }
        // One job at a time: run() returns only after every worker has finished, so no epoch can be missed.
        ++seen;
        if (stop_.load(std::memory_order_relaxed)) return;
        (*job_)(tid);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace pf
