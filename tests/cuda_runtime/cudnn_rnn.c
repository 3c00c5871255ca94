/* Recurrent networks: where their weights lie, and how much a step keeps (a guess). */
#include <stdbool.h>
#include <stdint.h>

#include "cudnn.h"

enum { DOUBLE = 1, HALF = 2, BFLOAT16 = 9 }; /* of cudnnDataType_t */
enum { LSTM = 2, GRU = 3 };                  /* of cudnnRNNMode_t */

struct rnn { int mode; bool biases; int directions, type, inputs, hidden, projected, layers; };
struct rnn_data { int type, length, batch, vector; };
DESCRIPTOR(RNNDescriptor, rnn)
DESCRIPTOR(RNNDataDescriptor, rnn_data)

int cudnnSetRNNDescriptor_v8(struct rnn *r, int, int mode, int biases, int directions, int, int type, int, int,
                             int32_t inputs, int32_t hidden, int32_t projected, int32_t layers, void *, uint32_t) {
    *r = (struct rnn){mode, biases, directions ? 2 : 1, type, inputs, hidden, projected, layers};
    return OK;
}

int cudnnSetRNNDataDescriptor(struct rnn_data *one, int type, int, int length, int batch, int vector, const int *,
                              void *) {
    *one = (struct rnn_data){type, length, batch, vector};
    return OK;
}

/* ---- Weights. Of each layer and direction: the matrices of the inputs' gates, then those of the hidden state's (and
 * the projection); after those of all layers, all biases. Sizes are in items. ---- */

static size_t item(int type) { return type == DOUBLE ? 8 : type == HALF || type == BFLOAT16 ? 2 : 4; }
static int gates(const struct rnn *r) { return r->mode == LSTM ? 4 : r->mode == GRU ? 3 : 1; }

static size_t inputs_of(const struct rnn *r, int layer) {
    return layer < r->directions ? (size_t)r->inputs : (size_t)r->projected * r->directions;
}

static size_t matrices(const struct rnn *r, int layer) {
    size_t projection = r->projected != r->hidden ? (size_t)r->projected * r->hidden : 0;
    return (size_t)gates(r) * r->hidden * (inputs_of(r, layer) + r->projected) + projection;
}

static size_t matrices_before(const struct rnn *r, int layer) {
    size_t sum = 0;
    for (int i = 0; i < layer; i++) sum += matrices(r, i);
    return sum;
}

static size_t biases(const struct rnn *r) { return r->biases ? (size_t)2 * gates(r) * r->hidden : 0; }

static int all_layers(const struct rnn *r) { return r->layers * r->directions; }

int cudnnGetRNNWeightSpaceSize(void *, const struct rnn *r, size_t *bytes) {
    size_t count = matrices_before(r, all_layers(r)) + (size_t)all_layers(r) * biases(r);
    *bytes = count * item(r->type);
    return OK;
}

/* `which` counts the gates of the inputs, then those of the hidden state, then the projection. torch asks for a matrix
 * and for its bias one at a time. */
int cudnnGetRNNWeightParams(void *, const struct rnn *r, int32_t layer, size_t, char *weights, int32_t which,
                            struct tensor *matrix, char **matrix_at, struct tensor *bias, char **bias_at) {
    bool projection = which >= 2 * gates(r), of_hidden = which >= gates(r);
    int rows = projection ? r->projected : r->hidden;
    int columns = projection ? r->hidden : of_hidden ? r->projected : (int)inputs_of(r, layer);
    if (matrix_at) {
        size_t at = matrices_before(r, layer);
        size_t of_inputs = (size_t)gates(r) * r->hidden * inputs_of(r, layer);
        if (projection) {
            at += of_inputs + (size_t)gates(r) * r->hidden * r->projected;
        } else if (of_hidden) {
            at += of_inputs + (size_t)(which - gates(r)) * rows * columns;
        } else {
            at += (size_t)which * rows * columns;
        }
        *matrix_at = weights + at * item(r->type);
        set_tensor(matrix, r->type, 3, (int[]){1, rows, columns}, (int[]){rows * columns, columns, 1});
    }
    if (bias_at && r->biases && !projection) {
        size_t at = matrices_before(r, all_layers(r)) + (size_t)layer * biases(r) + (size_t)which * r->hidden;
        *bias_at = weights + at * item(r->type);
        set_tensor(bias, r->type, 3, (int[]){1, rows, 1}, (int[]){rows, 1, 1});
    } else if (bias_at) {
        *bias_at = NULL;
    }
    return OK;
}

int cudnnGetRNNTempSpaceSizes(void *, const struct rnn *r, int training, const struct rnn_data *x, size_t *workspace,
                              size_t *kept) {
    size_t values = (size_t)x->length * x->batch * r->hidden * r->directions * item(r->type);
    if (workspace) *workspace = values * (size_t)gates(r);
    if (kept) *kept = training ? values * r->layers * (size_t)(gates(r) + 2) : 0;
    return OK;
}
