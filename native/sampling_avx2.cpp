#define PF_ISA avx2
#include "sampling_impl.h"
