/* libnvrtc.so.13: "programs" of one byte, at which cuModuleLoadData does not look. */
#include <stddef.h>

#include "handle.h"

MAKES_HANDLE(nvrtcCreateProgram)

int nvrtcDestroyProgram(void **program) {
    free(*program);
    *program = NULL;
    return 0;
}

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

static int one_byte(void *, size_t *size) {
    *size = 1;
    return 0;
}

static int empty_text(void *, char *text) {
    *text = 0;
    return 0;
}

int nvrtcGetPTXSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetPTX(void *program, char *text) { return empty_text(program, text); }
int nvrtcGetCUBINSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetCUBIN(void *program, char *text) { return empty_text(program, text); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetProgramLog(void *program, char *text) { return empty_text(program, text); }

int nvrtcGetLoweredName(void *, const char *name, const char **lowered) {
    *lowered = name;
    return 0;
}

int nvrtcAddNameExpression(void *, const char *) { return 0; }
int nvrtcCompileProgram(void *, int, const char *const *) { return 0; }
const char *nvrtcGetErrorString(int) { return "simulated NVRTC"; }
