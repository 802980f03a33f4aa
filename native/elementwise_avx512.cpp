#define PF_ISA avx512
#include "elementwise_impl.h"
