import { nullTranslator } from '@jupyterlab/translation';

import type { IContents } from '../api';
import { kindText, presentKinds } from '../dialogs/contents';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

const CONTENTS: IContents = {
  size: 60,
  new: 5,
  parent: 'S0',
  kinds: [
    { kind: 'anon', size: 10, new: 5 },
    { kind: 'python', size: 50, new: 0 },
    { kind: 'gpu', size: 0, new: 0 }
  ]
};

describe('presentKinds', () => {
  it('leaves out what there is none of, and has the largest first', () => {
    const kinds = presentKinds(CONTENTS).map(sum => sum.kind);
    expect(kinds).toEqual(['python', 'anon']);
    expect(CONTENTS.kinds[0].kind).toBe('anon');
  });
});

describe('kindText', () => {
  it('has words of its own for every kind', () => {
    const kinds = [
      'anon',
      'python',
      'libraries',
      'shared',
      'gpu',
      'files',
      'other'
    ] as const;
    expect(new Set(kinds.map(kind => kindText(kind, trans))).size).toBe(7);
    expect(kindText('gpu', trans)).toBe('GPU memory');
  });
});
