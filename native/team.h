// A team of threads that runs kernels: the caller is thread 0, the others spin for work, then sleep.
//
// A forward pass is some hundred kernels of 10 to 100 microseconds. Waking a sleeping thread costs 50 microseconds, so
// threads wait for each other by spinning, and yield only after a while: other processes may hold the core.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pf {

// Tells the core that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// All threads of a team meet here. Reusable; whatever was written before wait() is visible to all after it.
class Barrier {
  public:
    explicit Barrier(int num_threads) : num_threads_(num_threads) {}
    Barrier(const Barrier&) = delete;
    Barrier& operator=(const Barrier&) = delete;

    void wait() {
        wait([] {});
    }

    // Calls idle() again and again while it waits.
    template <class Idle>
    void wait(Idle&& idle) {
        if (num_threads_ == 1) return;
        const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
            idle();
            if (spins < kSpinsBeforeYield) spin_pause();
            else std::this_thread::yield();
        }
    }

  private:
    static constexpr int kSpinsBeforeYield = 4000;  // about 100 microseconds
    const int num_threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::uint32_t> phase_{0};
};

class Team {
  public:
    // spin_us: how long an idle worker spins before it sleeps.
    Team(int num_threads, int spin_us);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int num_threads() const { return num_threads_; }
    Barrier& barrier() { return barrier_; }

    // Calls job(tid) on every thread of the team, tid 0 on the calling thread, and returns when all are done.
    // Calls from several threads run one after the other. Jobs must not throw and must not call run().
    void run(const std::function<void(int)>& job);

  private:
    void work(int tid);

    const int num_threads_;
    const int spin_us_;
    Barrier barrier_;
    std::mutex mutex_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<std::uint32_t> epoch_{0};  // counts jobs; workers wait for it to change
    alignas(64) std::atomic<int> running_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace pf
