#define PF_ISA avx512
#include "sampling_impl.h"
