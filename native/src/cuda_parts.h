/* SPDX-License-Identifier: BSD-3-Clause */
/* Which part of a file of device memory is whose: that of one GPU after the other. */
#ifndef KC_CUDA_PARTS_H
#define KC_CUDA_PARTS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_tree.h"

/* The device memory of one process, part by part, in the order of its file. */
struct cuda_parts {
    size_t count;
    struct {
        struct cuda_uuid uuid; /* all zeros: not known */
        uint64_t size;         /* bytes */
    } parts[CUDA_GPUS_MAX];
    uint64_t total;
};

enum { CUDA_PARTS_TEXT = CUDA_GPUS_MAX * 80 };

/* As a list, a line each. */
void cuda_parts_format(const struct cuda_parts *parts, char text[CUDA_PARTS_TEXT]);
/* Reads such a list from the folder: 1, or 0 where there is none, or -1. */
int cuda_parts_read(int folder, pid_t pid, struct cuda_parts *parts);
/* Which part belongs to that GPU, the `at`th that the driver shows, and stands for the one that it was on.
 * Where there are no pairs the driver goes by the order of the GPUs; `parts->count`, none, where that is another
 * one now. */
size_t cuda_parts_find(const struct cuda_work *work, const struct cuda_parts *parts, size_t at,
                       const struct cuda_uuid *here);

#endif
