/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"
#include "procfs.h"

enum { RANGES_MAX = 1 << 18, RANGES_FIRST = 256 };

/* START-END PERMISSIONS OFFSET DEVICE INODE, and a name, if any. */
bool cuda_parse_mapping(const char *line, struct cuda_range *range)
{
    /* Anonymous memory of any kind; the first with a name of the program's. */
    static const char *const names[] = {"[anon", "/dev/zero (deleted)", "/memfd:"};
    char permissions[5];
    int at = 0;
    int name = 0;
    char *end;
    if (*line == '-' || *line == '+' || *line == ' ')
        return false;
    errno = 0;
    range->start = strtoull(line, &end, 16);
    if (errno != 0 || end == line || end[0] != '-' || end[1] == '-' || end[1] == '+' || end[1] == ' ')
        return false;
    const char *second = end + 1;
    range->end = strtoull(second, &end, 16);
    if (errno != 0 || end == second || *end != ' ' || range->end <= range->start)
        return false;
    if (sscanf(end, " %4s%n", permissions, &at) != 1 || strlen(permissions) != 4)
        return false;
    if (permissions[0] != 'r' && permissions[1] != 'w')
        return false; /* addresses that are kept free */
    if (sscanf(end + at, " %*s %*s %*s %n", &name) != 0 || name == 0)
        return false;
    const char *called = end + at + name;
    if (*called == '\0' || *called == '\n')
        return true;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strncmp(called, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

static bool add(struct cuda_ranges *ranges, const struct cuda_range *range)
{
    struct cuda_range *last = ranges->count > 0 ? &ranges->at[ranges->count - 1] : NULL;
    if (last != NULL && range->start < last->start)
        return false; /* the kernel lists them in order */
    if (last != NULL && range->start <= last->end) { /* one that grew between two reads is listed twice */
        last->end = range->end > last->end ? range->end : last->end;
        return true;
    }
    if (ranges->count == ranges->capacity) {
        size_t more = ranges->capacity > 0 ? ranges->capacity * 2 : RANGES_FIRST;
        struct cuda_range *moved =
            more > RANGES_MAX ? NULL : realloc(ranges->at, more * sizeof(*moved));
        if (moved == NULL)
            return false;
        ranges->at = moved;
        ranges->capacity = more;
    }
    ranges->at[ranges->count++] = *range;
    return true;
}

bool cuda_ranges_read(pid_t pid, struct cuda_ranges *ranges)
{
    char path[32];
    char *line = NULL;
    size_t capacity = 0;
    *ranges = (struct cuda_ranges){.at = NULL};
    snprintf(path, sizeof(path), "%d/maps", pid);
    int fd = openat(proc_fd(), path, O_RDONLY | O_CLOEXEC);
    FILE *maps = fd < 0 ? NULL : fdopen(fd, "re");
    if (maps == NULL) {
        io_close(&fd);
        return false;
    }
    bool good = true;
    while (good && getline(&line, &capacity, maps) > 0) {
        struct cuda_range range;
        if (cuda_parse_mapping(line, &range))
            good = add(ranges, &range);
    }
    good = good && ferror(maps) == 0;
    free(line);
    fclose(maps);
    if (!good)
        cuda_ranges_free(ranges);
    return good;
}

void cuda_ranges_free(struct cuda_ranges *ranges)
{
    free(ranges->at);
    *ranges = (struct cuda_ranges){.at = NULL};
}

ssize_t cuda_ranges_new(const struct cuda_ranges *before, const struct cuda_ranges *after,
                        struct cuda_range *found, size_t capacity)
{
    size_t count = 0;
    size_t old = 0;
    for (size_t i = 0; i < after->count; i++) {
        uint64_t at = after->at[i].start;
        while (at < after->at[i].end) {
            while (old < before->count && before->at[old].end <= at)
                old++;
            bool covered = old < before->count && before->at[old].start <= at;
            uint64_t next = covered                ? before->at[old].end
                            : old < before->count ? before->at[old].start
                                                   : after->at[i].end;
            next = next < after->at[i].end ? next : after->at[i].end;
            if (!covered) {
                if (count == capacity)
                    return -1;
                found[count++] = (struct cuda_range){at, next};
            }
            at = next;
        }
    }
    return (ssize_t)count;
}
