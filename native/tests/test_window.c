/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "window.h"

#include <fcntl.h>
#include <sys/stat.h>
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
    CHECK(chdir(base) == 0 && window_needed(&tree, dirs, 2));
    CHECK(chdir("/") == 0 && rmdir(base) == 0);
    tree_free(&tree);
}

int main(void)
{
    paths();
    map_lines();
    this_process();
    return 0;
}
