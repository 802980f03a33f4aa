// What this CPU and this operating system let us run.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace pf {

// Instruction sets whose kernels are in this build and run here, worst to best. Asks the kernel for AMX state.
const std::vector<Isa>& supported_isas();

const char* isa_name(Isa isa);
std::optional<Isa> isa_from_name(std::string_view name);

}  // namespace pf
