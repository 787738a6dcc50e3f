import { nullTranslator } from '@jupyterlab/translation';

import type { IState } from '../api';
import {
  gpuText,
  obstacleText,
  olderState,
  reasonText,
  stateMarks
} from '../dialogs/states';
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
    for (const reason of [
      'interval',
      'long_cell',
      'shutdown',
      'preemption',
      'cull',
      'hibernate'
    ]) {
      expect(reasonText(aState({ reason }), trans)).toMatch(/^Saved /);
    }
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

describe('stateMarks', () => {
  it('says what is special about a state, the worst first', () => {
    expect(stateMarks(aState(), trans)).toEqual([]);
    const state = aState({
      damage: '1 MB of it cannot be read back.',
      durable: false,
      encrypted: true,
      pinned: true
    });
    expect(stateMarks(state, trans)).toEqual([
      'damaged',
      'pinned',
      'local only',
      'encrypted'
    ]);
  });
});

describe('gpuText', () => {
  it('says how much is on which GPUs', () => {
    const text = (...names: string[]) => {
      const gpus = names.map((name, number) => ({
        uuid: `GPU-${number}`,
        name,
        memory: 80_000_000_000,
        used: true,
        choices: []
      }));
      const unused = {
        uuid: 'GPU-9',
        name: 'L4',
        memory: 1,
        used: false,
        choices: []
      };
      const memory = 3_200_000_000;
      return gpuText({ memory, gpus: [unused, ...gpus] }, trans);
    };
    expect(text('NVIDIA H200')).toBe('3.2 GB on NVIDIA H200');
    expect(text('H200', 'H100', 'H200')).toBe('3.2 GB on 2 × H200, H100');
    expect(text()).toBe('3.2 GB of GPU memory');
  });
});

describe('olderState', () => {
  it('is the newest one after it that is not known to be damaged', () => {
    const [newest, bad, good, oldest] = [
      aState({ id: '4' }),
      aState({ id: '3', damage: 'gone' }),
      aState({ id: '2' }),
      aState({ id: '1' })
    ];
    const states = [newest, bad, good, oldest];
    expect(olderState(states, newest)).toBe(good);
    expect(olderState(states, bad)).toBe(good);
    expect(olderState(states, oldest)).toBeNull();
  });
});
