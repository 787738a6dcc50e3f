import { Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import type { Event } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { KernelStateAPI } from '../api';
import { Endings } from '../endings';
import { KernelStates } from '../model';

const SERVER = 'https://schema.jupyter.org/jupyter_gpu_ckpt/server/v1';

describe('Endings', () => {
  const stream = new Signal<object, Event.Emission>({});
  const model = new KernelStates({
    api: {} as KernelStateAPI,
    events: { stream } as unknown as Event.IManager
  });
  new Endings({ model, trans: nullTranslator.load('') });

  function say(change: object): void {
    stream.emit({
      schema_id: SERVER,
      action: 'saved',
      ending_id: 'E1',
      source: 'slurm',
      why: 'The Slurm job 7 reaches its time limit.',
      sure: true,
      seconds: null,
      saved: 2,
      not_saved: [],
      not_uploaded: 0,
      ...change
    } as unknown as Event.Emission);
  }

  function shown(): string[] {
    jest.advanceTimersByTime(1000);
    return Notification.manager.notifications.map(
      ({ type, message }) => `${type}: ${message}`
    );
  }

  beforeEach(() => jest.useFakeTimers());

  afterEach(() => {
    Notification.dismiss();
    jest.useRealTimers();
  });

  it('tells once that the server ends, and then what is saved', () => {
    say({ action: 'ends', seconds: 25.4 });
    expect(shown()).toEqual([
      'warning: This server ends in 25 s: kernels are saved.'
    ]);
    say({});
    expect(shown()).toEqual(['success: This server ends. Kernels are saved.']);
  });

  it('tells what is not saved, and of ends that may not come', () => {
    say({ action: 'ends', seconds: 120, sure: false, ending_id: 'E2' });
    expect(shown()).toEqual([
      'warning: This server may end in 120 s: kernels are saved.'
    ]);
    say({ ending_id: 'E2', sure: false });
    expect(shown()).toEqual([
      'success: This server may end. Kernels are saved.'
    ]);
    say({ ending_id: 'E2', sure: false, not_uploaded: 1 });
    expect(shown()).toEqual([
      'warning: This server may end. Kernels are saved, on this node only.'
    ]);
    say({ ending_id: 'E2', sure: false, not_saved: ['a.ipynb', 'b.ipynb'] });
    expect(shown()).toEqual([
      'warning: This server may end, and 2 kernels could not be saved.'
    ]);
    say({ ending_id: 'E2', not_saved: ['a.ipynb', 'b.ipynb'] });
    expect(shown()).toEqual([
      'warning: This server ends, and 2 kernels could not be saved.'
    ]);
    say({ ending_id: 'E2', not_uploaded: 1 });
    expect(shown()).toEqual([
      'warning: This server ends. Kernels are saved, on this node only.'
    ]);
  });
});
