/* SPDX-License-Identifier: BSD-3-Clause */
#include "images.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "io.h"
#include "procfs.h"

uint64_t images_bytes(int images, bool pages_only)
{
    DIR *dir = io_open_dir(images, ".");
    if (dir == NULL)
        return 0;
    uint64_t sum = 0;
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        struct stat info;
        if (pages_only && strncmp(entry->d_name, "pages-", 6) != 0)
            continue;
        if (fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(info.st_mode))
            sum += (uint64_t)info.st_size;
    }
    closedir(dir);
    return sum;
}

void images_report_left_out(pid_t root_pid, struct json *json)
{
    pid_t pids[64];
    char name[64];
    struct proc_stat root;
    ssize_t count = -1;
    json_open(json, "left_out", '[');
    if (proc_stat(root_pid, &root) && root.ppid > 0 &&
        proc_comm(root.ppid, name, sizeof(name)) && strcmp(name, "kernel-capture") == 0) {
        snprintf(name, sizeof(name), "%d", root.ppid);
        count = proc_children_at(proc_fd(), name, pids, 64);
    }
    for (ssize_t i = 0; i < count; i++) {
        struct proc_stat stat;
        if (pids[i] == root_pid || !proc_stat(pids[i], &stat) || stat.state == 'Z')
            continue;
        json_open(json, NULL, '{');
        json_int(json, "pid", pids[i]);
        json_string(json, "comm", stat.comm);
        json_close(json);
    }
    json_close(json);
}
