/* SPDX-License-Identifier: BSD-3-Clause */
#include "hostmem.h"

#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"

static const int64_t unlimited = INT64_MAX;

/* The names of both versions of control groups. */
struct names {
    const char *mount, *limit, *usage, *idle[2]; /* `idle`: page cache that is given up when asked */
};
static const struct names second = {"/sys/fs/cgroup",
                                    "memory.max",
                                    "memory.current",
                                    {"inactive_file ", "active_file "}};
static const struct names first = {"/sys/fs/cgroup/memory",
                                   "memory.limit_in_bytes",
                                   "memory.usage_in_bytes",
                                   {"total_inactive_file ", "total_active_file "}};

static bool read_file(const char *path, char *text, size_t capacity)
{
    return io_read_file_at(AT_FDCWD, path, text, capacity) > 0;
}

/* The number behind a word at the beginning of a line; -1 without one. */
static int64_t field(const char *text, const char *word)
{
    size_t length = strlen(word);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, word, length) == 0)
            return strtoll(line + length, NULL, 10);
    }
    return -1;
}

static int64_t number_in(const char *folder, const char *name)
{
    char path[PATH_MAX];
    char text[64];
    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path) ||
        !read_file(path, text, sizeof(text)) || text[0] < '0' || text[0] > '9')
        return unlimited; /* "max", or no such file */
    return strtoll(text, NULL, 10);
}

static int64_t left_in_group(const char *folder, const struct names *names)
{
    char path[PATH_MAX];
    char text[8192];
    int64_t limit = number_in(folder, names->limit);
    int64_t used = limit == unlimited ? unlimited : number_in(folder, names->usage);
    if (used == unlimited)
        return unlimited;
    if (snprintf(path, sizeof(path), "%s/memory.stat", folder) < (int)sizeof(path) &&
        read_file(path, text, sizeof(text)))
        for (int i = 0; i < 2; i++) {
            int64_t cache = field(text, names->idle[i]);
            cache = cache < used ? cache : used; /* what was counted at another moment may be more */
            used -= cache > 0 ? cache : 0;
        }
    return limit > used ? limit - used : 0;
}

/* A container may see its own group at the top and be told another path: then only the top is there. */
static int64_t left_in_groups(const char *root, const char *group, const struct names *names)
{
    char path[PATH_MAX];
    size_t top = strlen(root) + strlen(names->mount);
    int64_t least = unlimited;
    if (snprintf(path, sizeof(path), "%s%s%s", root, names->mount, group) >= (int)sizeof(path))
        return unlimited;
    for (;;) {
        int64_t left = left_in_group(path, names);
        char *slash = strrchr(path, '/');
        least = left < least ? left : least;
        if (strlen(path) <= top || slash == NULL)
            return least;
        *slash = '\0';
    }
}

int64_t hostmem_available(const char *root, pid_t pid)
{
    char path[PATH_MAX];
    char text[8192];
    char *rest = NULL;
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    int64_t least = read_file(path, text, sizeof(text)) ? field(text, "MemAvailable:") : -1;
    least = least < 0 ? unlimited : least * 1024;
    snprintf(path, sizeof(path), "%s/proc/%d/cgroup", root, pid);
    if (read_file(path, text, sizeof(text)))
        for (char *line = strtok_r(text, "\n", &rest); line != NULL;
             line = strtok_r(NULL, "\n", &rest)) {
            /* NUMBER:CONTROLLERS:GROUP */
            char *controllers = strchr(line, ':');
            char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
            if (group == NULL)
                continue;
            *group++ = '\0';
            const struct names *names = strcmp(controllers, ":") == 0        ? &second
                                        : strcmp(controllers, ":memory") == 0 ? &first
                                                                              : NULL;
            int64_t left = names == NULL ? unlimited : left_in_groups(root, group, names);
            least = left < least ? left : least;
        }
    return least == unlimited ? -1 : least;
}

int64_t hostmem_unwritten(const char *root)
{
    char path[PATH_MAX];
    char text[8192];
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (!read_file(path, text, sizeof(text)))
        return 0;
    int64_t waiting = field(text, "Dirty:");
    int64_t written = field(text, "Writeback:");
    return ((waiting > 0 ? waiting : 0) + (written > 0 ? written : 0)) * 1024;
}
