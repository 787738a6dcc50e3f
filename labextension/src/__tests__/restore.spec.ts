import { nullTranslator } from '@jupyterlab/translation';

import { reasonText } from '../dialogs/restore';
import { aState } from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

describe('reasonText', () => {
  it("prefers the user's own label", () => {
    const label = 'before the long run';
    expect(reasonText(aState({ label }), trans)).toBe(label);
  });

  it('has words for the reasons it knows, and shows the others', () => {
    expect(reasonText(aState(), trans)).toBe('Saved by you');
    expect(reasonText(aState({ reason: 'idle' }), trans)).toBe(
      'Saved while idle'
    );
    expect(reasonText(aState({ reason: 'drain' }), trans)).toBe('drain');
  });
});
