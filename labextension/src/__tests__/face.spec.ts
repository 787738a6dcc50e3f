import { nullTranslator } from '@jupyterlab/translation';

import { faceOf } from '../face';
import type { IKernelEntry } from '../model';
import { aKernel, anError, anOperation, aState } from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

function face(change: Partial<IKernelEntry>) {
  return faceOf(
    { kernel: null, error: null, operation: null, ...change },
    trans
  );
}

describe('faceOf', () => {
  it('is ready for a kernel that can be saved', () => {
    const { state, label, title, error } = face({ kernel: aKernel() });
    expect(state).toBe('ready');
    expect(label).toBeUndefined();
    expect(title).toBe('Save kernel state');
    expect(error).toBeUndefined();
  });

  it('shows how far a save is', () => {
    const shown = face({ kernel: aKernel(), operation: anOperation() });
    expect(shown.state).toBe('saving');
    expect(shown.label).toBe('42%');
    expect(shown.title).toContain('42%');
    // A screen reader must not be told of each percent.
    expect(shown.announcement).not.toContain('42');
  });

  it('tells a restore from a save', () => {
    const operation = anOperation({ kind: 'restore' });
    expect(face({ kernel: aKernel(), operation }).state).toBe('restoring');
  });

  it('shows the age of the last state', () => {
    const created = new Date(Date.now() - 5 * 60_000 - 5000).toISOString();
    const last_state = aState({ created });
    const shown = face({ kernel: aKernel({ last_state }) });
    expect(shown.state).toBe('saved');
    expect(shown.label).toBe('Saved 5 min. ago');
    expect(shown.title).toBe('Save kernel state (saved 5 minutes ago)');
    const automatic = aState({ created, reason: 'idle' });
    expect(face({ kernel: aKernel({ last_state: automatic }) }).title).toBe(
      'Save kernel state (saved automatically 5 minutes ago)'
    );
  });

  it('shows that a kernel is hibernated', () => {
    const kernel = aKernel({
      execution_state: 'hibernated',
      savable: false,
      error: anError(),
      last_state: aState()
    });
    const shown = face({ kernel });
    expect(shown.state).toBe('hibernated');
    expect(shown.title).toContain('wakes on the next run');
    expect(shown.error).toBeUndefined();
    const error = anError({ message: 'It fell.', reason: 'restore_failed' });
    expect(face({ kernel: { ...kernel, error } }).title).toBe(
      'It fell. (click to try again)'
    );
  });

  it('says why a kernel cannot be saved, and what helps', () => {
    const error = anError({ hint: 'Ask the administrator.' });
    const shown = face({ kernel: aKernel({ savable: false, error }) });
    expect(shown.state).toBe('unavailable');
    expect(shown.title).toBe(
      'Cannot save kernel state: It cannot be captured here.\nAsk the administrator.'
    );
    expect(shown.error).toEqual(error);
  });

  it('says how to enable a missing server extension', () => {
    const error = anError({ reason: 'no_extension', message: 'Not Found' });
    const shown = face({ error });
    expect(shown.state).toBe('unavailable');
    expect(shown.error?.hint).toContain('jupyter server extension enable');
  });

  it('keeps the cause of a missing connection among the details', () => {
    const error = anError({ reason: 'unreachable', message: 'ECONNREFUSED' });
    const shown = face({ error }).error;
    expect(shown?.message).toBe('The Jupyter server cannot be reached.');
    expect(shown?.details).toBe('ECONNREFUSED');
  });

  it('is unavailable without a kernel', () => {
    const shown = faceOf(null, trans);
    expect(shown.state).toBe('unavailable');
    expect(shown.error?.reason).toBe('no_kernel');
  });

  it('does not claim anything before the server answered', () => {
    const shown = face({});
    expect(shown.state).toBe('unavailable');
    expect(shown.error).toBeUndefined();
  });
});
