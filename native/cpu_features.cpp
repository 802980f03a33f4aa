#include "cpu_features.h"

#include <array>
#include <utility>

#if defined(PF_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace pf {
namespace {

constexpr std::array<std::pair<Isa, const char*>, 4> kNames{{{Isa::avx2, "avx2"},
                                                             {Isa::avx512, "avx512"},
                                                             {Isa::avx512_bf16, "avx512_bf16"},
                                                             {Isa::amx, "amx"}}};

#if defined(PF_X86)

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

constexpr bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// The register state that the operating system saves at a context switch (XCR0).
unsigned enabled_state() {
    if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Linux gives a process the 8 KB of tile state only when it asks.
bool request_amx() {
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
    return false;
#endif
}

std::vector<Isa> detect() {
    std::vector<Isa> isas;
    const unsigned state = enabled_state();
    const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;

    const bool avx2 = ymm && bit(leaf1.ecx, 12) && bit(leaf1.ecx, 28) && bit(leaf1.ecx, 29) && bit(leaf7.ebx, 5);
    const bool avx512 = avx2 && zmm && bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 30) &&
                        bit(leaf7.ebx, 31);
    const bool avx512_bf16 = avx512 && bit(leaf7_1.eax, 5);
    const bool amx = avx512_bf16 && tiles && bit(leaf7.edx, 22) && bit(leaf7.edx, 24);
#if defined(PF_HAVE_AVX2)
    if (avx2) isas.push_back(Isa::avx2);
#endif
#if defined(PF_HAVE_AVX512)
    if (avx512) isas.push_back(Isa::avx512);
#endif
#if defined(PF_HAVE_AVX512_BF16)
    if (avx512_bf16) isas.push_back(Isa::avx512_bf16);
#endif
#if defined(PF_HAVE_AMX)
    if (amx && request_amx()) isas.push_back(Isa::amx);
#endif
    return isas;
}

#else

std::vector<Isa> detect() { return {}; }

#endif

}  // namespace

const std::vector<Isa>& supported_isas() {
    static const std::vector<Isa> isas = detect();  // cpuid is slow in a virtual machine
    return isas;
}

bool fast_dpbf16() {
#if defined(PF_X86)
    static const bool fast = [] {
        const Registers vendor = cpuid(0, 0);
        return !(vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 && vendor.ecx == 0x6c65746e);  // GenuineIntel
    }();
    return fast;
#else
    return false;
#endif
}

const char* isa_name(Isa isa) { return kNames[static_cast<std::size_t>(isa)].second; }

std::optional<Isa> isa_from_name(std::string_view name) {
    for (const auto& [isa, text] : kNames) {
        if (name == text) return isa;
    }
    return std::nullopt;
}

}  // namespace pf
