/* SPDX-License-Identifier: BSD-3-Clause */
#include "repair.h"

#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"

#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

enum { NOTES_MAX = 1 << 16 };

struct note {
    ino_t inode;
    int reuse;
};

static struct note *notes;
static size_t note_count;

static int option(int fd, int level, int name)
{
    int value = -1;
    socklen_t size = sizeof(value);
    return getsockopt(fd, level, name, &value, &size) == 0 ? value : -1;
}

static ino_t inode(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

static void note(int fd)
{
    struct note *more;
    int reuse = option(fd, SOL_SOCKET, SO_REUSEADDR);
    if (reuse < 0 || note_count >= NOTES_MAX)
        return;
    more = reallocarray(notes, note_count + 1, sizeof(*notes));
    if (more == NULL)
        return;
    notes = more;
    notes[note_count++] = (struct note){.inode = inode(fd), .reuse = reuse};
}

/* What a socket had. Of one that is younger than the notes it is not known: on, or a connection that
 * was accepted in that instant would keep its port from whoever listens there after the tree. */
static int reuse_of(int fd)
{
    ino_t number = inode(fd);
    for (size_t i = 0; i < note_count; i++)
        if (notes[i].inode == number)
            return notes[i].reuse;
    return 1;
}

static void end(int fd)
{
    int off = 0;
    int reuse = reuse_of(fd);
    if (option(fd, IPPROTO_TCP, TCP_REPAIR) != 1 ||
        setsockopt(fd, IPPROTO_TCP, TCP_REPAIR, &off, sizeof(off)) != 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
}

static bool is_socket(int dir, const char *name)
{
    static const char prefix[] = "socket:[";
    char target[32];
    ssize_t n = readlinkat(dir, name, target, sizeof(target));
    return n > (ssize_t)sizeof(prefix) && memcmp(target, prefix, sizeof(prefix) - 1) == 0;
}

static void each_socket(const struct tree_task *task, void (*act)(int fd))
{
    int pidfd = sys_pidfd_open(task->pid);
    DIR *dir = proc_dir(task->pid, "fd");
    struct proc_stat stat;
    /* The number is the task's own if it is so after the pidfd is held. */
    bool same = proc_stat(task->pid, &stat) && stat.starttime == task->starttime;
    for (const struct dirent *entry;
         pidfd >= 0 && dir != NULL && same && (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.' || !is_socket(dirfd(dir), entry->d_name))
            continue;
        int number = (int)strtol(entry->d_name, NULL, 10);
        int fd = (int)syscall(SYS_pidfd_getfd, pidfd, number, 0);
        if (fd < 0)
            continue;
        if (option(fd, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP)
            act(fd);
        close(fd);
    }
    if (dir != NULL)
        closedir(dir);
    io_close(&pidfd);
}

static void each_task(const struct tree *tree, void (*act)(int fd))
{
    /* All: a kernel may have the caller's own ones, as in a container with ambient capabilities, and
     * /proc shows its descriptors only to who has them in effect. */
    caps_raise_all();
    for (size_t i = 0; i < tree->count; i++)
        each_socket(&tree->tasks[i], act);
    caps_lower();
}

void repair_note(const struct tree *tree)
{
    each_task(tree, note);
}

void repair_end(const struct tree *tree)
{
    each_task(tree, end);
}
