/* SPDX-License-Identifier: BSD-3-Clause */
#include "args.h"
#include "check.h"

static struct args parsed;
static struct kc_result result;

static bool parse(const char *line)
{
    static char text[1024];
    static char *argv[64]; /* what was parsed points into it */
    int argc = 0;
    memset(text, 0, sizeof(text));
    strncpy(text, line, sizeof(text) - 1);
    argv[argc++] = text; /* not looked at */
    char *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save))
        argv[argc++] = word;
    argv[argc] = NULL;
    result = (struct kc_result){0};
    bool good = args_parse(argc, argv, &parsed, &result);
    CHECK(good == (result.reason == KC_OK));
    CHECK(good || (result.reason == KC_USAGE && result.message[0] != '\0'));
    return good;
}

static void good_lines(void)
{
    CHECK(parse("probe") && parsed.command == ARGS_PROBE);
    CHECK(parse("run --log f --env-fd 7 -- prog --log x"));
    CHECK(parsed.env_fd == 7);
    CHECK_STRING(parsed.log, "f");
    CHECK_STRING(parsed.program[0], "prog");
    CHECK_STRING(parsed.program[1], "--log");
    CHECK(parsed.program[3] == NULL);
    CHECK(parse("dump --pid 42 --images-dir=/d --timeout 1.5 --ghost-limit 0 --leave killed "
                "--window-dir /tmp --window-dir=/dev/shm --window-timeout 2"));
    CHECK(parsed.pid == 42 && parsed.leave == LEAVE_KILLED && parsed.window_dir_count == 2);
    CHECK(parsed.timeout > 1.49 && parsed.timeout < 1.51 && parsed.ghost_limit == 0);
    CHECK_STRING(parsed.images_dir, "/d");
    CHECK_STRING(parsed.window_dirs[1], "/dev/shm");
    CHECK(parse("restore --images-dir d --hold --pid-namespace never --pids-file p"));
    CHECK(parsed.hold && parsed.pid_namespace == PIDNS_NEVER);
    CHECK(parse("restore --images-dir d") && !parsed.hold && parsed.pid_namespace == PIDNS_AUTO);
    CHECK(!parsed.stream && parse("restore --images-dir d --stream") && parsed.stream);
    CHECK(parse("restore --images-dir d --gpu-timeout 5 "
                "--gpu-map GPU-00112233-4455-6677-8899-aabbccddeeff="
                "GPU-ffeeddcc-bbaa-9988-7766-554433221100"));
    CHECK(parsed.gpu_map_count == 1 && parsed.gpu_map[0].from.bytes[1] == 0x11 &&
          parsed.gpu_map[0].to.bytes[15] == 0 && parsed.gpu_timeout > 4.9);
    CHECK(parse("dump --pid 7 --images-dir d") && !parsed.gpu_to_store && !parsed.parked);
    CHECK(parse("dump --pid 7 --images-dir d --gpu-to-store --parked"));
    CHECK(parsed.gpu_to_store && parsed.parked);
    CHECK(parse("park --pid 7 --timeout 3 --gpu-timeout 2") && parsed.command == ARGS_PARK);
    CHECK(parse("unpark --pid 7 --gpu-need GPU-00112233-4455-6677-8899-aabbccddeeff=4096"));
    CHECK(parsed.command == ARGS_UNPARK && parsed.gpu_need_count == 1 &&
          parsed.gpu_needs[0].bytes == 4096 && parsed.gpu_needs[0].uuid.bytes[0] == 0);
    CHECK(parse("--help") && parse("--version"));
}

static void bad_lines(void)
{
    static const char *const lines[] = {
        "",
        "walk",
        "probe --log f",
        "probe extra",
        "run -- prog",
        "run --log f",
        "run --log f --",
        "run --log f prog",
        "run --log f --env-fd 2 -- prog",
        "run --log f --env-fd -1 -- prog",
        "run --log f --env-fd 9999999999999999999999 -- prog",
        "dump --pid 1 --images-dir d",
        "dump --pid 0 --images-dir d",
        "dump --pid 4294967298 --images-dir d",
        "dump --pid +5 --images-dir d",
        "dump --pid 5x --images-dir d",
        "dump --pid 5",
        "dump --images-dir d",
        "dump --pid 5 --images-dir d --timeout 0",
        "dump --pid 5 --images-dir d --timeout -1",
        "dump --pid 5 --images-dir d --timeout nan",
        "dump --pid 5 --images-dir d --timeout 1e9",
        "dump --pid 5 --images-dir d --timeout 99999999",
        "dump --pid 5 --images-dir d --timeout 1.5.2",
        "dump --pid 5 --images-dir d --timeout 1.",
        "dump --pid 5 --images-dir d --timeout .5",
        "dump --pid 5 --images-dir d --timeout 0.0000001",
        "dump --pid 5 --images-dir d --timeout 0x10",
        "dump --pid 5 --images-dir d --timeout 1,5",
        "dump --pid 5 --images-dir d --window-timeout inf",
        "restore --images-dir d --hold-timeout nan",
        "restore --images-dir d --timeout -inf",
        "park --pid 7 --timeout inf",
        "park --pid 7 --timeout=nan",
        "park --pid 7 --gpu-timeout NAN",
        "unpark --pid 7 --gpu-timeout -0.5",
        "unpark --pid 7 --gpu-timeout +5",
        "dump --pid 5 --images-dir d --ghost-limit 1M",
        "dump --pid 5 --images-dir d --leave sleeping",
        "dump --pid 5 --images-dir d --window-dir tmp",
        "dump --pid 5 --images-dir d -- x",
        "dump --pid 5 --images-dir d --hold",
        "dump --pid 5 --images-dir d --stream",
        "park --pid 5 --parked",
        "restore --images-dir d --gpu-to-store",
        "restore --images-dir d --stream=yes",
        "dump --pid 5 --images-dir d --time 3",
        "dump --pid 5 --images-dir d --timeout",
        "restore --images-dir d --gpu-map GPU-1=GPU-2",
        "restore --images-dir d --gpu-map GPU-00112233-4455-6677-8899-aabbccddeeff",
        "restore --images-dir d "
        "--gpu-map "
        "GPU-00112233-4455-6677-8899-aabbccddeeff="
        "GPU-ffeeddcc-bbaa-9988-7766-554433221100x",
        "restore --images-dir d "
        "--gpu-map "
        "GPU-00112233-4455-6677-8899-aabbccddeeff/GPU-ffeeddcc-bbaa-9988-7766-554433221100",
        "restore --images-dir d "
        "--gpu-map "
        "MIG-00112233-4455-6677-8899-aabbccddeeff="
        "GPU-ffeeddcc-bbaa-9988-7766-554433221100",
        "restore --images-dir d "
        "--gpu-map "
        "GPU-00112233-4455-6677-8899-aabbccddeeff="
        "GPU-ffeeddcc-bbaa-9988-7766-554433221100 "
        "--gpu-map "
        "GPU-00112233-4455-6677-8899-aabbccddeeff="
        "GPU-ffeeddcc-bbaa-9988-7766-554433221100",
        "park",
        "unpark",
        "park --pid 0",
        "park --pid 7 "
        "--gpu-map "
        "GPU-00112233-4455-6677-8899-aabbccddeeff="
        "GPU-ffeeddcc-bbaa-9988-7766-554433221100",
        "unpark --pid 7 --gpu-need GPU-00112233-4455-6677-8899-aabbccddeeff",
        "unpark --pid 7 --gpu-need GPU-00112233-4455-6677-8899-aabbccddeeff=",
        "unpark --pid 7 --gpu-need GPU-00112233-4455-6677-8899-aabbccddeeff=-1",
        "unpark --pid 7 --gpu-need GPU-00112233-4455-6677-8899-aabbccddeeff=1M",
        "park --pid 7 --images-dir d",
        "restore --hold",
        "restore --images-dir d --hold=yes",
        "restore --images-dir d --lib-dir /tmp",
        "restore --images-dir d --action-script x",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        if (parse(lines[i])) {
            fprintf(stderr, "accepted: %s\n", lines[i]);
            exit(1);
        }
    }
}

static void too_many_window_dirs(void)
{
    char line[1024] = "dump --pid 5 --images-dir d";
    char *argv[ARGS_WINDOW_DIRS_MAX * 2 + 16];
    char words[4][16] = {"x", "dump", "--window-dir", "/d"};
    int argc = 2;
    argv[0] = words[0];
    argv[1] = words[1];
    for (int i = 0; i <= ARGS_WINDOW_DIRS_MAX; i++) {
        argv[argc++] = words[2];
        argv[argc++] = words[3];
    }
    argv[argc] = NULL;
    result = (struct kc_result){0};
    CHECK(!args_parse(argc, argv, &parsed, &result) && result.reason == KC_USAGE);
    CHECK(parse(line));
}

static void mangled_lines(void)
{
    uint64_t state = 88172645463325252ULL;
    static const char sample[] = "dump --pid 42 --images-dir=/d --timeout 1.5 --ghost-limit 0 "
                                 "--leave killed --window-dir /tmp --window-timeout 2";
    for (int i = 0; i < 20000; i++) {
        char *line = check_mangle(sample, &state);
        if (parse(line))
            CHECK(parsed.pid >= 2 && parsed.timeout > 0 && parsed.images_dir != NULL);
        free(line);
    }
}

int main(void)
{
    good_lines();
    bad_lines();
    too_many_window_dirs();
    mangled_lines();
    return 0;
}
