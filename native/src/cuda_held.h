/* SPDX-License-Identifier: BSD-3-Clause */
/* What this process has stored and not brought back: its file is held open, because whoever began the save may
 * be gone by then, and have removed the folder; and what no file has is in memory. */
#ifndef KC_CUDA_HELD_H
#define KC_CUDA_HELD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_file.h"
#include "cuda_parts.h"

struct cuda_held {
    pid_t pid;
    struct cuda_parts parts;
    struct cuda_file *file; /* NULL: none of it is there */
    uint64_t in_file;       /* bytes, the first */
    unsigned char *rest;    /* all after them; NULL: nothing */
    struct cuda_held *next;
};

/* In place of what is held of that process; NULL where there is no memory. */
struct cuda_held *cuda_held_make(pid_t pid);
/* NULL: nothing. */
struct cuda_held *cuda_held_find(pid_t pid);
void cuda_held_drop(pid_t pid);
/* Takes memory for all but the first `in_file` bytes. False: the host has none left; unless it `must` be, much is
 * left to others. */
bool cuda_held_take(struct cuda_held *held, uint64_t in_file, bool must);
/* Nothing of it is in the file. */
void cuda_held_leave_file(struct cuda_held *held);

#endif
