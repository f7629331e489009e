// Tensors of the server's JSON: {shape, data}, with little-endian float32 values in base64.

export class Tensor {
  constructor(shape, values) {
    this.shape = shape;
    this.values = values;
  }

  static of(packed) {
    const bytes = Uint8Array.from(atob(packed.data), (character) => character.charCodeAt(0));
    return new Tensor(packed.shape, new Float32Array(bytes.buffer));
  }

  // The matrix (rows, columns) of one head or layer of a tensor (heads, rows, columns).
  at(index) {
    const [, rows, columns] = this.shape;
    const size = rows * columns;
    return new Tensor([rows, columns], this.values.subarray(index * size, (index + 1) * size));
  }

  get(row, column) {
    return this.values[row * this.shape[1] + column];
  }

  mean() {
    const [heads, rows, columns] = this.shape;
    const size = rows * columns;
    const sum = new Float32Array(size);
    for (let head = 0; head < heads; head++)
      for (let i = 0; i < size; i++) sum[i] += this.values[head * size + i] / heads;
    return new Tensor([rows, columns], sum);
  }
}

// Groups of tokens that form a word: [{text, from, to}], with `to` exclusive.
export function wordsOf(tokens, show) {
  const words = [];
  tokens.forEach((token, at) => {
    const last = words.at(-1);
    if (last && last.word === token.word) {
      last.to = at + 1;
      last.text += show(token);
    } else words.push({ word: token.word, from: at, to: at + 1, text: show(token), special: token.special });
  });
  return words;
}

// Attention between words: the sum over the key tokens of a word, and the mean over its query tokens.
export function betweenWords(matrix, queries, keys) {
  const out = new Tensor([queries.length, keys.length], new Float32Array(queries.length * keys.length));
  queries.forEach((query, i) =>
    keys.forEach((key, j) => {
      let sum = 0;
      for (let t = query.from; t < query.to; t++) for (let s = key.from; s < key.to; s++) sum += matrix.get(t, s);
      out.values[i * keys.length + j] = sum / (query.to - query.from);
    }),
  );
  return out;
}
