#define PF_ISA avx512
#include "attention_cache_impl.h"
#include "attention_fma.h"

namespace pf::avx512 {

const AttentionTable attention_f32 = table_of<FmaMath<float>>();
const AttentionTable attention_bf16 = table_of<FmaMath<Bf16>>();

}  // namespace pf::avx512
