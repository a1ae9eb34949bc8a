// AMX tile registers: leave to use them, and their shapes.

#pragma once

#include "vectors.h"

#if defined(__AMX_INT8__)

#include <sys/syscall.h>
#include <unistd.h>

namespace {

// What _tile_loadconfig reads. Keep one in memory of its own: GCC 12 takes the instruction to read 8 bytes only, and may
// leave out the rest of a local one.
struct alignas(64) TileShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline bool allowed_tiles() {
    // Linux lends the tile registers to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

}  // namespace

#endif  // AMX
