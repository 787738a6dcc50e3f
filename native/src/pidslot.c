/* SPDX-License-Identifier: BSD-3-Clause */
#include "pidslot.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"
#include "result.h"

#ifndef CAP_CHECKPOINT_RESTORE
#define CAP_CHECKPOINT_RESTORE 40
#endif

enum {
    LEAST = 1024,         /* with fewer numbers in all there is nothing to choose */
    TRIES = 16,
    FREE_RUN = 64,        /* numbers after the slot that should be free: threads and first children */
    SAMPLE = 32,          /* steps that tell how long a step takes */
};

static const double step_seconds = 0.5; /* bound of the work when stepping */

pid_t pidslot_random(long pid_max, unsigned long long random)
{
    unsigned long long low = (unsigned long long)pid_max / 4;
    unsigned long long high = (unsigned long long)pid_max / 10 * 9;
    return (pid_t)(low + random % (high - low));
}

static unsigned long long random_bits(void)
{
    unsigned long long bits = 0;
    if (getrandom(&bits, sizeof(bits), 0) != (ssize_t)sizeof(bits))
        bits = (unsigned long long)getpid() * 2654435761ULL ^ (unsigned long long)(io_now() * 1e9);
    return bits;
}

static bool run_is_free(pid_t first, const pid_t *wanted, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (wanted[i] >= first && wanted[i] < first + FREE_RUN)
            return false;
    for (pid_t pid = first; pid < first + FREE_RUN; pid++)
        if (proc_exists(pid))
            return false;
    return true;
}

static bool write_last_pid(pid_t last)
{
    int fd = openat(proc_fd(), "sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    char text[16];
    int length = snprintf(text, sizeof(text), "%d", last);
    bool done = write(fd, text, (size_t)length) == length;
    io_close(&fd);
    return done;
}

/* One process that ends at once: moves the counter by one and returns its number. */
static pid_t step(void)
{
    pid_t pid = vfork();
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        sys_wait(pid, NULL);
    return pid;
}

static void step_towards(long pid_max, unsigned long long random)
{
    double start = io_now();
    pid_t at = -1;
    for (int i = 0; i < SAMPLE; i++)
        if ((at = step()) < 0)
            return;
    double each = (io_now() - start) / SAMPLE;
    long reach = (long)(step_seconds * 0.8 / (each > 1e-6 ? each : 1e-6));
    long low = pid_max / 4;
    long high = pid_max / 10 * 9;
    /* What cannot be reached in time is not tried: then a random place within reach must do. */
    if (high > at + reach)
        high = at + reach;
    if (low > at + reach / 4)
        low = at + reach / 4;
    if (low < at)
        low = at;
    if (high <= low)
        return;
    pid_t target = (pid_t)(low + (long)(random % (unsigned long long)(high - low)));
    while (at < target && io_now() - start < step_seconds) {
        pid_t now = step();
        if (now < at)
            return; /* wrapped, or no process could be made */
        at = now;
    }
}

/* Whether the counter is before a free stretch now. */
static bool place(long pid_max, const pid_t *wanted, size_t count)
{
    bool raised = caps_raise(CAP_CHECKPOINT_RESTORE) || caps_raise(CAP_SYS_ADMIN);
    bool placed = false;
    for (int i = 0; i < TRIES && !placed; i++) {
        pid_t slot = pidslot_random(pid_max, random_bits());
        if (!run_is_free(slot, wanted, count) && i + 1 < TRIES)
            continue;
        placed = write_last_pid(slot - 1);
        if (!placed)
            break;
    }
    if (raised)
        caps_lower();
    return placed;
}

void pidslot_choose(void)
{
    long pid_max = proc_sysctl("sys/kernel/pid_max", 32768);
    if (pid_max >= LEAST && !place(pid_max, NULL, 0))
        step_towards(pid_max, random_bits());
}

void pidslot_keep_clear(const pid_t *wanted, size_t count)
{
    long pid_max = proc_sysctl("sys/kernel/pid_max", 32768);
    if (pid_max >= LEAST)
        place(pid_max, wanted, count);
}
