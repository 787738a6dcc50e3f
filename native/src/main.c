/* SPDX-License-Identifier: BSD-3-Clause */
#include <stdio.h>

#include "args.h"
#include "caps.h"
#include "config.h"
#include "dump.h"
#include "io.h"
#include "json.h"
#include "park.h"
#include "probe.h"
#include "procfs.h"
#include "restore.h"
#include "run.h"

int main(int argc, char **argv)
{
    struct args args;
    struct kc_result result = {0};
    if (!io_secure_stdio())
        return 1;
    if (!caps_init(&result) || !args_parse(argc, argv, &args, &result)) {
        event_error(&result);
        fputs(args_usage, stderr);
        return 2;
    }
    proc_open();
    if (proc_fd() < 0) {
        kc_fail(&result, KC_INTERNAL, "/proc is not mounted.");
        event_error(&result);
        return 1;
    }
    switch (args.command) {
    case ARGS_PROBE:
        return probe_command();
    case ARGS_RUN:
        return run_command(&args);
    case ARGS_DUMP:
        return dump_command(&args);
    case ARGS_RESTORE:
        return restore_command(&args);
    case ARGS_PARK:
    case ARGS_UNPARK:
        return park_command(&args);
    case ARGS_VERSION:
        puts("kernel-capture " KC_VERSION);
        return 0;
    case ARGS_HELP:
        fputs(args_usage, stdout);
        return 0;
    }
    return 2;
}
