/* SPDX-License-Identifier: BSD-3-Clause */
#include "window.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "args.h"
#include "io.h"
#include "procfs.h"

static const char deleted[] = " (deleted)";
static const char socket_link[] = "socket:[";

enum { SOCKETS_MAX = 1024 };

struct search {
    char dirs[ARGS_WINDOW_DIRS_MAX][PATH_MAX];
    size_t count;
    unsigned long sockets[SOCKETS_MAX]; /* inodes of Unix sockets bound below the dirs */
    size_t socket_count;
    bool sockets_unknown; /* too many of them, or they could not be read */
};

bool window_below(const char *path, const char *dir)
{
    size_t length = strlen(dir);
    while (length > 0 && dir[length - 1] == '/')
        length--;
    return strncmp(path, dir, length) == 0 && (path[length] == '/' || path[length] == '\0') &&
           path[0] == '/';
}

const char *window_maps_path(char *line)
{
    /* start-end perms offset dev inode path; the path may hold blanks. */
    char *cursor = line;
    for (int field = 0; field < 5; field++) {
        cursor += strcspn(cursor, " \n");
        cursor += strspn(cursor, " ");
    }
    cursor[strcspn(cursor, "\n")] = '\0';
    return *cursor == '/' ? cursor : NULL;
}

const char *window_unix_path(char *line, unsigned long *inode)
{
    /* address: references protocol flags type state inode path; most sockets have no path. */
    char *cursor = line;
    for (int field = 0; field < 6; field++) {
        cursor += strcspn(cursor, " \n");
        cursor += strspn(cursor, " ");
    }
    char *end = NULL;
    *inode = strtoul(cursor, &end, 10);
    if (end == cursor || *end != ' ')
        return NULL;
    cursor = end + 1;
    cursor[strcspn(cursor, "\n")] = '\0';
    return *cursor == '/' ? cursor : NULL;
}

/* Sockets of the whole network namespace; whether the tree holds one is seen at its fds. */
static void find_sockets(struct search *search, pid_t pid)
{
    search->socket_count = 0;
    search->sockets_unknown = true;
    char name[32];
    snprintf(name, sizeof(name), "%d/net/unix", pid);
    int fd = openat(proc_fd(), name, O_RDONLY | O_CLOEXEC);
    FILE *table = fd < 0 ? NULL : fdopen(fd, "r");
    if (table == NULL) {
        io_close(&fd);
        return;
    }
    search->sockets_unknown = false;
    char *line = NULL;
    size_t capacity = 0;
    while (!search->sockets_unknown && getline(&line, &capacity, table) > 0) {
        unsigned long inode = 0;
        const char *path = window_unix_path(line, &inode);
        bool below = false;
        for (size_t i = 0; path != NULL && !below && i < search->count; i++)
            below = window_below(path, search->dirs[i]);
        if (below && search->socket_count == SOCKETS_MAX)
            search->sockets_unknown = true;
        else if (below)
            search->sockets[search->socket_count++] = inode;
    }
    free(line);
    fclose(table);
}

static bool socket_matters(const struct search *search, const char *link)
{
    if (search->sockets_unknown)
        return true;
    unsigned long inode = strtoul(link + strlen(socket_link), NULL, 10);
    for (size_t i = 0; i < search->socket_count; i++)
        if (search->sockets[i] == inode)
            return true;
    return false;
}

static bool link_remap_beside(const char *path)
{
    char dir[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (slash == NULL || (size_t)(slash - path) >= sizeof(dir))
        return true;
    memcpy(dir, path, (size_t)(slash - path));
    dir[slash - path] = '\0';
    DIR *stream = opendir(dir[0] == '\0' ? "/" : dir);
    if (stream == NULL)
        return errno != ENOENT && errno != ENOTDIR;
    bool found = false;
    for (const struct dirent *entry; !found && (entry = readdir(stream)) != NULL;)
        found = strncmp(entry->d_name, "link_remap.", strlen("link_remap.")) == 0;
    closedir(stream);
    return found;
}

static bool path_matters(const struct search *search, const char *path)
{
    if (path[0] != '/' || strncmp(path, "/memfd:", 7) == 0 || strncmp(path, "/SYSV", 5) == 0 ||
        strncmp(path, "/dev/zero", 9) == 0)
        return false;
    size_t length = strlen(path);
    size_t tail = sizeof(deleted) - 1;
    if (length > tail && strcmp(path + length - tail, deleted) == 0)
        return link_remap_beside(path); /* else CRIU has the contents in the image */
    for (size_t i = 0; i < search->count; i++)
        if (window_below(path, search->dirs[i]))
            return true;
    return false;
}

static bool link_matters(const struct search *search, int dir, const char *name)
{
    char target[PATH_MAX + 16];
    ssize_t n = readlinkat(dir, name, target, sizeof(target) - 1);
    if (n < 0)
        return errno != ENOENT;
    target[n] = '\0';
    if (strncmp(target, socket_link, strlen(socket_link)) == 0)
        return socket_matters(search, target);
    return path_matters(search, target);
}

static bool fds_matter(const struct search *search, pid_t pid)
{
    DIR *dir = proc_dir(pid, "fd");
    if (dir == NULL)
        return true;
    bool found = false;
    for (const struct dirent *entry; !found && (entry = readdir(dir)) != NULL;)
        if (entry->d_name[0] != '.')
            found = link_matters(search, dirfd(dir), entry->d_name);
    closedir(dir);
    return found;
}

static bool mappings_matter(const struct search *search, pid_t pid)
{
    char name[32];
    snprintf(name, sizeof(name), "%d/maps", pid);
    int fd = openat(proc_fd(), name, O_RDONLY | O_CLOEXEC);
    FILE *maps = fd < 0 ? NULL : fdopen(fd, "r");
    if (maps == NULL) {
        io_close(&fd);
        return true;
    }
    bool found = false;
    char *line = NULL;
    size_t capacity = 0;
    while (!found && getline(&line, &capacity, maps) > 0) {
        const char *path = window_maps_path(line);
        found = path != NULL && path_matters(search, path);
    }
    free(line);
    fclose(maps);
    return found;
}

bool window_needed(const struct tree *tree, const char *const *dirs, size_t count)
{
    static struct search search;
    search.count = 0;
    for (size_t i = 0; i < count && i < ARGS_WINDOW_DIRS_MAX; i++)
        if (realpath(dirs[i], search.dirs[search.count]) != NULL)
            search.count++;
        else if (errno != ENOENT && errno != ENOTDIR)
            return true; /* it is there, and what is below it cannot be told */
    if (tree->count > 0)
        find_sockets(&search, tree->tasks[0].pid);
    for (size_t i = 0; i < tree->count; i++) {
        pid_t pid = tree->tasks[i].pid;
        if (tree->tasks[i].state == 'Z' || tree->tasks[i].state == 'X')
            continue;
        char name[32];
        snprintf(name, sizeof(name), "%d/cwd", pid);
        if (link_matters(&search, proc_fd(), name) || fds_matter(&search, pid) ||
            mappings_matter(&search, pid))
            return true;
    }
    return false;
}
