/* SPDX-License-Identifier: BSD-3-Clause */
/* Which memory of a process came into being while the driver copied its device memory to the host: what was no
 * memory of its own before and is afterwards, by address. */
#ifndef KC_CUDA_MAPS_H
#define KC_CUDA_MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct cuda_range {
    uint64_t start, end; /* `end` is behind it */
};

/* In order of their addresses, and none touches the next. */
struct cuda_ranges {
    struct cuda_range *at;
    size_t count, capacity;
};

/* A line of /proc/PID/maps. False: it is none, or not of accessible memory without a file. */
bool cuda_parse_mapping(const char *line, struct cuda_range *range);
/* All of a process. False: it cannot be told, or there are too many. */
bool cuda_ranges_read(pid_t pid, struct cuda_ranges *ranges);
void cuda_ranges_free(struct cuda_ranges *ranges);
/* What of `after` is not in `before`; how many ranges, or -1 where they do not fit. */
ssize_t cuda_ranges_new(const struct cuda_ranges *before, const struct cuda_ranges *after,
                        struct cuda_range *found, size_t capacity);

#endif
