/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "window.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "procfs.h"

static void paths(void)
{
    CHECK(window_below("/tmp/a", "/tmp") && window_below("/tmp", "/tmp"));
    CHECK(window_below("/tmp/a/b", "/tmp/") && window_below("/tmp/a", "/"));
    CHECK(!window_below("/tmpx", "/tmp") && !window_below("/tm", "/tmp"));
    CHECK(!window_below("/var/tmp/a", "/tmp") && !window_below("", "/"));
    CHECK(!window_below("socket:[5]", "/"));
}

static const char *maps(const char *line)
{
    static char copy[4096];
    memset(copy, 0, sizeof(copy));
    strncpy(copy, line, sizeof(copy) - 1);
    return window_maps_path(copy);
}

static const char sample[] =
    "7f0000000000-7f0000001000 r-xp 00000000 fd:00 1234567                    /usr/lib/a b.so\n";

static void map_lines(void)
{
    CHECK_STRING(maps(sample), "/usr/lib/a b.so");
    CHECK_STRING(maps("1-2 rw-s 0 00:01 5 /dev/shm/sem.x (deleted)\n"), "/dev/shm/sem.x (deleted)");
    CHECK(maps("1-2 rw-p 0 00:00 0 \n") == NULL && maps("1-2 rw-p 0 00:00 0\n") == NULL);
    CHECK(maps("1-2 rw-p 0 00:00 0  [heap]\n") == NULL && maps("") == NULL && maps("\n") == NULL);
    uint64_t state = 88675123;
    for (int i = 0; i < 20000; i++) {
        char *line = check_mangle(sample, &state);
        const char *path = window_maps_path(line);
        CHECK(path == NULL || *path == '/');
        free(line);
    }
}

static void socket_lines(void)
{
    unsigned long inode = 0;
    char bound[] = "0000000000000000: 00000002 00000000 00010000 0001 01   123 /tmp/a b\n";
    CHECK_STRING(window_unix_path(bound, &inode), "/tmp/a b");
    CHECK(inode == 123);
    char abstract[] = "0000000000000000: 00000002 00000000 00010000 0001 01 123 @/tmp/a\n";
    char unnamed[] = "0000000000000000: 00000003 00000000 00000000 0001 03 1447179\n";
    char heading[] = "Num       RefCount Protocol Flags    Type St Inode Path\n";
    char empty[] = "";
    CHECK(window_unix_path(abstract, &inode) == NULL && window_unix_path(unnamed, &inode) == NULL);
    CHECK(window_unix_path(heading, &inode) == NULL && window_unix_path(empty, &inode) == NULL);
    uint64_t state = 362436069;
    static const char line[] = "0: 2 0 10000 1 01 123 /tmp/a\n";
    for (int i = 0; i < 20000; i++) {
        char *copy = check_mangle(line, &state);
        const char *path = window_unix_path(copy, &inode);
        CHECK(path == NULL || *path == '/');
        free(copy);
    }
}

static int bind_below(const char *base)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/socket", base);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    CHECK(unlink(address.sun_path) == 0);
    return fd;
}

static void this_process(void)
{
    char base[] = "/tmp/kernel-capture-window-XXXXXX";
    char file[4096];
    char remap[4096];
    const char *const dirs[] = {"/no/such/dir", base};
    struct tree tree = {0};
    CHECK(mkdtemp(base) != NULL && proc_open() == -1);
    snprintf(file, sizeof(file), "%s/file", base);
    snprintf(remap, sizeof(remap), "%s/link_remap.1", base);
    CHECK(tree_collect(&tree, getpid(), true) && tree.count == 1);
    CHECK(!window_needed(&tree, dirs, 2));
    int fd = open(file, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0 && window_needed(&tree, dirs, 2) && !window_needed(&tree, dirs, 1));
    /* Deleted: CRIU has it, unless it left a name beside it. */
    CHECK(unlink(file) == 0 && !window_needed(&tree, dirs, 2));
    int other = open(remap, O_WRONLY | O_CREAT | O_EXCL, 0600);
    CHECK(other >= 0);
    close(other);
    CHECK(window_needed(&tree, dirs, 0));
    CHECK(unlink(remap) == 0 && !window_needed(&tree, dirs, 2));
    close(fd);
    /* Bound here: its folder must be there when it is bound again. */
    char loop[4096];
    const char *const unknown[] = {loop};
    snprintf(loop, sizeof(loop), "%s/loop", base);
    CHECK(symlink(loop, loop) == 0 && window_needed(&tree, unknown, 1) && unlink(loop) == 0);
    fd = bind_below(base);
    CHECK(window_needed(&tree, dirs, 2) && !window_needed(&tree, dirs, 1));
    close(fd);
    CHECK(chdir(base) == 0 && window_needed(&tree, dirs, 2));
    CHECK(chdir("/") == 0 && rmdir(base) == 0);
    tree_free(&tree);
}

int main(void)
{
    paths();
    map_lines();
    socket_lines();
    this_process();
    return 0;
}
