// What this CPU and this operating system let us run.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace pf {

// Instruction sets whose kernels are in this build and run here, worst to best. Asks the kernel for AMX state.
const std::vector<Isa>& supported_isas();

// Whether vdpbf16ps is taken to be faster than the two multiply-adds that it replaces. Not on Intel's cores: on Sapphire
// Rapids it runs at a quarter of their rate.
bool fast_dpbf16();

const char* isa_name(Isa isa);
std::optional<Isa> isa_from_name(std::string_view name);

}  // namespace pf
