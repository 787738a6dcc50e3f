/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"

void cuda_parts_format(const struct cuda_parts *parts, char text[CUDA_PARTS_TEXT])
{
    size_t length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < parts->count; i++) {
        char uuid[CUDA_UUID_TEXT];
        cuda_format_uuid(&parts->parts[i].uuid, uuid);
        length += (size_t)snprintf(text + length, CUDA_PARTS_TEXT - length, "%s %" PRIu64 "\n", uuid,
                                   parts->parts[i].size);
    }
}

int cuda_parts_read(int folder, pid_t pid, struct cuda_parts *parts)
{
    char name[40], text[CUDA_PARTS_TEXT];
    *parts = (struct cuda_parts){.count = 0};
    snprintf(name, sizeof(name), "gpu-memory-%d.parts", pid);
    if (io_read_file_at(folder, name, text, sizeof(text)) < 0)
        return errno == ENOENT ? 0 : -1;
    for (const char *at = text; *at != '\0'; parts->count++) {
        char *end;
        struct cuda_uuid uuid;
        if (parts->count == CUDA_GPUS_MAX || !cuda_parse_uuid(at, ' ', &uuid))
            return -1;
        at += CUDA_UUID_TEXT;
        if (at[-1] != ' ' || *at < '0' || *at > '9')
            return -1;
        errno = 0;
        uint64_t size = strtoull(at, &end, 10);
        if (errno != 0 || *end != '\n' || size > (uint64_t)INT64_MAX - parts->total)
            return -1;
        parts->parts[parts->count].uuid = uuid;
        parts->parts[parts->count].size = size;
        parts->total += size;
        at = end + 1;
    }
    return 1;
}

static void new_uuid(const struct cuda_work *work, struct cuda_uuid *uuid)
{
    for (size_t i = 0; i < work->pair_count; i++)
        if (memcmp(&work->pairs[i].from, uuid, sizeof(*uuid)) == 0) {
            *uuid = work->pairs[i].to;
            return;
        }
}

size_t cuda_parts_find(const struct cuda_work *work, const struct cuda_parts *parts, size_t at,
                       const struct cuda_uuid *here)
{
    for (size_t i = 0; i < parts->count; i++) {
        struct cuda_uuid there = parts->parts[i].uuid;
        new_uuid(work, &there);
        if (memcmp(&there, here, sizeof(there)) == 0)
            return work->pair_count > 0 || i == at ? i : parts->count;
    }
    return work->pair_count == 0 ? at : parts->count;
}
