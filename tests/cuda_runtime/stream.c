/* Streams, events, and the capture of graphs.
 *
 * Work is done when it is queued. But with FAKE_CUDA_EVENT_LAG, a recorded event is ready only that many
 * milliseconds later, and its stream is busy until then. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "cudart.h"
#include "machine.h"

/* Never freed: a stream or an event may name it after its end. */
struct capture { unsigned long long id; cudaStream_t origin; bool active; };

struct CUstream_st { int priority; double busy_until; struct capture *capture; };
struct CUevent_st { bool recorded; double time, ready; struct capture *capture; };
struct CUgraph_st { unsigned long long capture; };

static struct CUstream_st default_stream;
static double all_busy_until;
static int active_captures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The handles 0 to 2 are names of the default stream (legacy and per thread). */
static cudaStream_t stream_of(cudaStream_t handle) { return (size_t)handle > 2 ? handle : &default_stream; }

static bool capturing(cudaStream_t stream) { return stream->capture && stream->capture->active; }

static double later(double one, double other) { return one > other ? one : other; }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void wait_until(double time) {
    while (now() < time) usleep(100);
}

/* ---- Streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    *stream = calloc(1, sizeof **stream);
    (*stream)->priority = priority;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return now() < stream_of(stream)->busy_until ? cudaErrorNotReady : cudaSuccess;
}

/* Waiting is forbidden during a capture, in which nothing runs. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (capturing(stream_of(stream))) return failed(cudaErrorStreamCaptureUnsupported);
    wait_until(stream_of(stream)->busy_until);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    if (active_captures) return failed(cudaErrorStreamCaptureUnsupported);
    wait_until(all_busy_until);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

/* ---- Events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = calloc(1, sizeof **event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    cudaStream_t stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    event->recorded = true;
    event->time = now();
    event->ready = later(stream->busy_until, event->time + (double)number_setting("FAKE_CUDA_EVENT_LAG", 0));
    event->capture = stream->capture;
    stream->busy_until = event->ready;
    all_busy_until = later(all_busy_until, event->ready);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

/* A stream that waits for an event of a captured stream is captured, too. */
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    cudaStream_t stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    stream->busy_until = later(stream->busy_until, event->ready);
    if (event->capture && event->capture->active) stream->capture = event->capture;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return now() < event->ready ? cudaErrorNotReady : cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    wait_until(event->ready);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start->recorded || !end->recorded) return failed(cudaErrorInvalidResourceHandle);
    if (now() < later(start->ready, end->ready)) return cudaErrorNotReady;
    *milliseconds = (float)(end->time - start->time);
    return cudaSuccess;
}

/* ---- Graphs: a capture has a number and an end; a replay does nothing ---- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = own;
    own = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode) {
    static unsigned long long captures;
    if (stream_of(stream) == &default_stream) return failed(cudaErrorStreamCaptureUnsupported);
    if (capturing(stream)) return failed(cudaErrorIllegalState);
    pthread_mutex_lock(&lock);
    stream->capture = malloc(sizeof *stream->capture);
    *stream->capture = (struct capture){++captures, stream, true};
    active_captures++;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = NULL;
    if (!capturing(stream_of(stream))) return failed(cudaErrorIllegalState);
    if (stream->capture->origin != stream) return failed(cudaErrorStreamCaptureUnmatched);
    *graph = malloc(sizeof **graph);
    (*graph)->capture = stream->capture->id;
    pthread_mutex_lock(&lock);
    stream->capture->active = false;
    active_captures--;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    bool active = capturing(stream_of(stream));
    *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = capturing(stream_of(stream)) ? stream->capture->id : 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t, unsigned long long) {
    *executable = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}

/* One node, since torch warns of an empty graph. */
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes && *count) nodes[0] = NULL;
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *count) {
    *count = 0;
    return cudaSuccess;
}
