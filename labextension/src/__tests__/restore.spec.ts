import { nullTranslator } from '@jupyterlab/translation';

import type { IState } from '../api';
import { obstacleText, reasonText } from '../dialogs/restore';
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

describe('obstacleText', () => {
  it('says what is possible in spite of the obstacle', () => {
    const text = (modes: IState['modes']) =>
      obstacleText(aState({ modes }), trans);
    expect(text([])).toBe('This state cannot be restored here:');
    expect(text(['new'])).toContain('only be opened as a new kernel');
    expect(text(['rollback'])).toContain('cannot be opened as a new kernel');
  });
});
