/* SPDX-License-Identifier: BSD-3-Clause */
/* How much memory a process may still take, read from made-up files of both kinds of control groups. */
#include "check.h"
#include "hostmem.h"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/kernel-capture-hostmem-XXXXXX";

static void put(const char *name, const char *text)
{
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s%s", root, name);
    for (char *slash = path + sizeof(root); (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void clear(void)
{
    char command[sizeof(root) + 32];
    snprintf(command, sizeof(command), "rm -rf %s/*", root);
    CHECK(system(command) == 0); /* NOLINT: a test's own folder */
}

int main(void)
{
    CHECK(mkdtemp(root) != NULL);
    CHECK(hostmem_available(root, 7) == -1);
    put("/proc/meminfo", "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\n");
    CHECK(hostmem_available(root, 7) == 5000 * 1024);
    CHECK(hostmem_unwritten(root) == 0);
    put("/proc/meminfo", "MemAvailable:    5000 kB\nDirty:    70 kB\nWriteback:    8 kB\n");
    CHECK(hostmem_unwritten(root) == 78 * 1024);

    put("/proc/7/cgroup", "0::/jobs/one\n");
    CHECK(hostmem_available(root, 7) == 5000 * 1024); /* its group is not to be seen */
    put("/sys/fs/cgroup/jobs/one/memory.max", "max\n");
    put("/sys/fs/cgroup/jobs/one/memory.current", "50\n");
    CHECK(hostmem_available(root, 7) == 5000 * 1024);
    put("/sys/fs/cgroup/jobs/memory.max", "1000\n");
    put("/sys/fs/cgroup/jobs/memory.current", "900\n");
    CHECK(hostmem_available(root, 7) == 100);
    put("/sys/fs/cgroup/jobs/memory.stat", "anon 3\ninactive_file 20\nactive_file 7\nshmem 5\n");
    CHECK(hostmem_available(root, 7) == 127);
    put("/sys/fs/cgroup/jobs/memory.stat", "inactive_file 800\nactive_file 700\n");
    CHECK(hostmem_available(root, 7) == 1000); /* never more than the limit */
    put("/sys/fs/cgroup/jobs/one/memory.max", "60\n");
    CHECK(hostmem_available(root, 7) == 10);
    put("/sys/fs/cgroup/jobs/one/memory.max", "40\n");
    CHECK(hostmem_available(root, 7) == 0);

    clear();
    put("/proc/7/cgroup", "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "800\n"); /* a container's own */
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n");
    put("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 30\n");
    CHECK(hostmem_available(root, 7) == 330);
    put("/proc/7/cgroup", "nonsense\n:\n4:memory\n");
    CHECK(hostmem_available(root, 7) == -1);
    clear();
    CHECK(rmdir(root) == 0);
    CHECK(hostmem_available("", getpid()) > 0);
    return 0;
}
