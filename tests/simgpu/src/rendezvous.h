// SPDX-License-Identifier: BSD-3-Clause
// How a process asks the driver thread of another one to lock, checkpoint, restore, unlock it.
#pragma once

#include <limits.h>

#include "driver.h"

enum command_op {
    COMMAND_LOCK = 1,
    COMMAND_CHECKPOINT,
    COMMAND_RESTORE,
    COMMAND_UNLOCK,
    COMMAND_FAIL,
    COMMAND_COMPLETE,
};

struct command {
    uint32_t sequence;
    uint32_t op;
    uint32_t timeout_ms;
    uint32_t pair_count;
    uint64_t token;            // custom storage: where the device memory is handed over, else 0
    uint64_t contexts;         // ... and the GPUs on which the caller has its primary context, a bit each
    char folder[SIM_FOLDER];   // the machine of the caller: it is the one to restore on
    CUcheckpointGpuPair pairs[SIM_MAX_GPUS * 2];
};
// So that it is written to the pipe in one piece.
_Static_assert(sizeof(struct command) <= PIPE_BUF, "a command fits into a pipe");

struct answer {
    uint32_t sequence;
    int32_t status;
    uint64_t value;
};

// What others read of this process: found through the mapping of this library.
struct control {
    char magic[24];
    int32_t initialised;
    int32_t state; // CUprocessState
    int32_t tid;   // of the driver thread, as the process itself numbers it
    int32_t request_fd;
    int32_t answer_fd;
};
extern volatile struct control control;

// The control block of another process. CUDA_ERROR_INVALID_VALUE: no such process;
// CUDA_ERROR_NOT_INITIALIZED: it does not use CUDA; CUDA_ERROR_OPERATING_SYSTEM: no right to look.
CUresult read_control(int pid, struct control *out);
// The thread's number as this process sees it.
CUresult restore_thread(int pid, int *tid);
CUresult send_command(int pid, struct command *command, uint64_t *value);
