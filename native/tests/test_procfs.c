/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "procfs.h"

#include <unistd.h>

static const char stat_line[] =
    "4711 (py (x) thon) S 1 4711 4700 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654321 "
    "111 222 18446744073709551615 1 1 0 0 0 0 0 16781312 2 0 0 0 17 1 0 0 0 0 0\n";

static const char status_text[] =
    "Name:\tpython3\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t42\nPid:\t42\nPPid:\t1\n"
    "TracerPid:\t7\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t5\t5\t5\nNSpid:\t4242\t42\t7\n"
    "RssAnon:\t     100 kB\nRssFile:\t 5 kB\nRssShmem:\t       2 kB\n"
    "CapInh:\t0000000000000001\nCapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n"
    "CapBnd:\t000001ffffffffff\nCapAmb:\t0000010000001000\nNoNewPrivs:\t1\nSeccomp:\t2\n";

static void stat_lines(void)
{
    struct proc_stat stat;
    CHECK(proc_parse_stat(stat_line, &stat));
    CHECK(stat.pid == 4711 && stat.ppid == 1 && stat.pgrp == 4711 && stat.session == 4700);
    CHECK(stat.state == 'S' && stat.starttime == 987654321ULL);
    CHECK_STRING(stat.comm, "py (x) thon");
    CHECK(!proc_parse_stat("", &stat));
    CHECK(!proc_parse_stat("12", &stat));
    CHECK(!proc_parse_stat("12 (x)", &stat));
    CHECK(!proc_parse_stat("12 (x) S 1 2 3", &stat));
    CHECK(!proc_parse_stat("x (x) S 1 2 3", &stat));
    CHECK(!proc_parse_stat(")(", &stat));
}

static void status_texts(void)
{
    struct proc_status status;
    CHECK(proc_parse_status(status_text, &status));
    CHECK(status.uid[0] == 1000 && status.uid[3] == 1003 && status.tracer == 7);
    CHECK(status.nspid_count == 3 && status.nspid[0] == 4242 && status.nspid[2] == 7);
    CHECK(status.rss_anon == 102400 && status.rss_shmem == 2048);
    CHECK(status.cap_prm == 0x1ffffffffffULL && status.cap_amb == 0x10000001000ULL);
    CHECK(status.no_new_privs && status.seccomp == 2);
    /* Without all four user ids nothing may be concluded. */
    CHECK(!proc_parse_status("Name:\tx\n", &status));
    CHECK(!proc_parse_status("Uid:\t1\t2\t3\n", &status));
    CHECK(!proc_parse_status("Uid:\t1\t2\t3\t-4\n", &status));
    CHECK(!proc_parse_status("Uid:\t1\t2\t3\t99999999999\n", &status));
    CHECK(!proc_parse_status("", &status));
    /* A name that looks like a field does not make one: the kernel escapes its newline. */
    CHECK(proc_parse_status("Name:\tUid:\\n\nUid:\t9\t9\t9\t9\n", &status) && status.uid[0] == 9);
}

static void pid_lists(void)
{
    pid_t pids[3];
    CHECK(proc_parse_pids("", pids, 3) == 0);
    CHECK(proc_parse_pids(" 1\n22 \t333\n", pids, 3) == 3);
    CHECK(pids[0] == 1 && pids[1] == 22 && pids[2] == 333);
    CHECK(proc_parse_pids("1 2 3 4", pids, 3) == -1);
    CHECK(proc_parse_pids("0", pids, 3) == -1);
    CHECK(proc_parse_pids("-1", pids, 3) == -1);
    CHECK(proc_parse_pids("1,2", pids, 3) == -1);
    CHECK(proc_parse_pids("1x", pids, 3) == -1);
    CHECK(proc_parse_pids("99999999999", pids, 3) == -1);
}

static void mangled(void)
{
    uint64_t state = 521288629;
    for (int i = 0; i < 20000; i++) {
        struct proc_stat stat;
        struct proc_status status;
        pid_t pids[4];
        char *text = check_mangle(stat_line, &state);
        if (proc_parse_stat(text, &stat))
            CHECK(stat.pid > 0 && memchr(stat.comm, '\0', sizeof(stat.comm)) != NULL);
        free(text);
        text = check_mangle(status_text, &state);
        if (proc_parse_status(text, &status))
            CHECK(status.nspid_count <= PROC_NSPID_MAX);
        free(text);
        text = check_mangle("1 22 333 4444", &state);
        CHECK(proc_parse_pids(text, pids, 4) <= 4);
        free(text);
    }
}

static void this_process(void)
{
    struct proc_stat stat;
    struct proc_status status;
    char comm[64];
    CHECK(proc_open() == -1 && proc_fd() >= 0);
    CHECK(proc_stat(getpid(), &stat) && stat.pid == getpid() && stat.ppid == getppid());
    CHECK(proc_status(getpid(), &status) && status.uid[0] == getuid());
    CHECK(status.nspid_count >= 1 && status.nspid[status.nspid_count - 1] == getpid());
    CHECK(proc_comm(getpid(), comm, sizeof(comm)));
    CHECK_STRING(comm, "test_procfs");
    CHECK(proc_exists(getpid()) && !proc_exists(0));
    CHECK(proc_namespace(0, "pid") != 0 && proc_namespace(0, "pid") == proc_namespace(getpid(), "pid"));
    CHECK(proc_namespace(0, "nonsense") == 0);
    CHECK(proc_sysctl("sys/kernel/pid_max", -1) > 300);
    CHECK(proc_sysctl("sys/kernel/none", -1) == -1);
}

int main(void)
{
    stat_lines();
    status_texts();
    pid_lists();
    mangled();
    this_process();
    return 0;
}
