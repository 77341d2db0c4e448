/* What a pack does, written by hand as plain C: I-H-O with ReLU, softmax cross entropy and Adam; and a step of an LSTM of H units.
 * All numbers are float, as in a pack for 32 bits; compiled with -O3 or -Os, without traps and errno, a * b + c in one. */
float expf(float), logf(float);
static float root(float x) { return __builtin_sqrtf(x); }

#ifdef LSTM
struct heap {
    float x[I], h[H], c[H], out[O];
    float wx[I][4 * H], wh[H][4 * H], b[4 * H], w[H][O], bo[O];
};

static float logistic(float x) { return 1 / (1 + expf(-x)); }
static float hyperbolic(float x) { return 1 - 2 / (1 + expf(2 * x)); }

int stream(struct heap *restrict s)
{
    float z[4 * H];
    for (int j = 0; j < 4 * H; j++) z[j] = s->b[j];
    for (int i = 0; i < I; i++)
        for (int j = 0; j < 4 * H; j++) z[j] += s->x[i] * s->wx[i][j];
    for (int i = 0; i < H; i++)
        for (int j = 0; j < 4 * H; j++) z[j] += s->h[i] * s->wh[i][j];
    for (int j = 0; j < H; j++) {
        s->c[j] = logistic(z[H + j]) * s->c[j] + logistic(z[j]) * hyperbolic(z[2 * H + j]);
        s->h[j] = logistic(z[3 * H + j]) * hyperbolic(s->c[j]);
    }
    for (int j = 0; j < O; j++) s->out[j] = s->bo[j];
    for (int i = 0; i < H; i++)
        for (int j = 0; j < O; j++) s->out[j] += s->h[i] * s->w[i][j];
    return 0;
}
#else
struct parameters {
    float w1[I][H], b1[H], w2[H][O], b2[O];
};
enum { N = sizeof(struct parameters) / sizeof(float) };
struct heap {
    float x[I], label, loss, out[O], c1, c2; /* c1 = 1 - beta1^t, c2 = 1 - beta2^t */
    struct parameters p;
    float m[N], v[N];
};
static const float RATE = 1e-2f, BETA1 = 0.9f, BETA2 = 0.999f, EPS = 1e-8f;

static void forward(const struct heap *restrict s, float *restrict a, float *restrict z)
{
    for (int j = 0; j < H; j++) a[j] = s->p.b1[j];
    for (int i = 0; i < I; i++)
        for (int j = 0; j < H; j++) a[j] += s->x[i] * s->p.w1[i][j];
    for (int j = 0; j < H; j++) a[j] = a[j] > 0 ? a[j] : 0;
    for (int j = 0; j < O; j++) z[j] = s->p.b2[j];
    for (int i = 0; i < H; i++)
        for (int j = 0; j < O; j++) z[j] += a[i] * s->p.w2[i][j];
}

int predict(struct heap *restrict s)
{
    float a[H];
    forward(s, a, s->out);
    return 0;
}

int step(struct heap *restrict s)
{
    float a[H], z[O], dz[O], da[H], largest, sum = 0;
    struct parameters g;
    forward(s, a, z);
    largest = z[0];
    for (int j = 1; j < O; j++) largest = z[j] > largest ? z[j] : largest;
    for (int j = 0; j < O; j++) sum += dz[j] = expf(z[j] - largest);
    int k = (int)s->label;
    s->loss = logf(sum) + largest - z[k];
    for (int j = 0; j < O; j++) dz[j] = dz[j] / sum - (j == k);
    for (int i = 0; i < H; i++) {
        float d = 0;
        for (int j = 0; j < O; j++) {
            d += dz[j] * s->p.w2[i][j];
            g.w2[i][j] = a[i] * dz[j];
        }
        da[i] = a[i] > 0 ? d : 0;
    }
    for (int j = 0; j < O; j++) g.b2[j] = dz[j];
    for (int i = 0; i < I; i++)
        for (int j = 0; j < H; j++) g.w1[i][j] = s->x[i] * da[j];
    for (int j = 0; j < H; j++) g.b1[j] = da[j];
    s->c1 = BETA1 * s->c1 + (1 - BETA1);
    s->c2 = BETA2 * s->c2 + (1 - BETA2);
    float size = RATE / s->c1, scale = 1 / root(s->c2);
    float *restrict p = &s->p.w1[0][0], *restrict m = s->m, *restrict v = s->v;
    const float *restrict d = &g.w1[0][0];
    for (int i = 0; i < N; i++) {
        m[i] += (1 - BETA1) * (d[i] - m[i]);
        v[i] = BETA2 * v[i] + (1 - BETA2) * d[i] * d[i];
        p[i] -= size * m[i] / (root(v[i]) * scale + EPS);
    }
    return 0;
}
#endif
