import { Dialog } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import { Actions } from '../actions';
import type { IState, KernelStateAPI } from '../api';
import { showDetails } from '../dialogs/details';
import { RequestError } from '../request';
import { Server, aState, anError, until } from './fixtures';

const trans = nullTranslator.load('');

// Pages are not laid out here.
Element.prototype.scrollIntoView = () => undefined;

const find = <T extends HTMLElement>(selector: string) =>
  document.querySelector<T>(`.jp-Dialog ${selector}`);
const title = () => find('.jp-Dialog-header')?.textContent;

function press(key: string, target: Element = document.activeElement!): Event {
  const event = new KeyboardEvent('keydown', {
    key,
    bubbles: true,
    cancelable: true
  });
  target.dispatchEvent(event);
  return event;
}

describe('The dialog with the details of an error', () => {
  it('has a name, one for what is scrolled too, and gives the focus back', async () => {
    const before = document.createElement('button');
    document.body.append(before);
    before.focus();
    const error = anError({ hint: 'Ask.', details: 'Error (criu/files.c)' });
    const closed = showDetails('Saving Failed', error, trans);
    await until(() => find('pre') !== null);
    const dialog = document.querySelector('.jp-Dialog')!;
    expect(dialog.getAttribute('aria-label')).toBe('Saving Failed');
    expect(dialog.textContent).toContain('It cannot be captured here.Ask.');
    const details = find('pre')!;
    expect(details.textContent).toBe('Error (criu/files.c)');
    expect(details.getAttribute('role')).toBe('region');
    expect(details.getAttribute('aria-label')).toBe('Details');
    expect(details.tabIndex).toBe(0);
    await until(() => document.activeElement !== before);
    press('Escape');
    await closed;
    expect(document.activeElement).toBe(before);
    before.remove();
  });
});

describe('The dialog to restore', () => {
  let actions: Actions;
  let all: IState[];
  let isOver: boolean;
  let server: Server;
  const contents = jest.fn();
  const deleteState = jest.fn();
  const restore = jest.fn();

  const listed = () =>
    [...document.querySelectorAll('.jp-Dialog [data-state-id]')].map(item =>
      item.getAttribute('data-state-id')
    );

  beforeEach(() => {
    jest.clearAllMocks();
    server = new Server();
    all = [
      aState({ id: 'S4', path: 'b.ipynb', kernel_id: 'K2' }),
      // Of the notebook's kernel when it had another name, and of its kernel before.
      aState({ id: 'S1', path: 'old.ipynb', created: '2026-12-01T10:00:00Z' }),
      aState({ id: 'S2', created: '2026-12-01T11:00:00Z' }),
      aState({ id: 'S3', kernel_id: 'K0', created: '2026-12-01T12:00:00Z' })
    ];
    const states = async (of: { kernel?: string; path?: string }) =>
      all.filter(
        state =>
          (!of.kernel || state.kernel_id === of.kernel) &&
          (!of.path || state.path === of.path)
      );
    deleteState.mockImplementation(async id => {
      all = all.filter(state => state.id !== id);
    });
    Object.assign(server, { contents, deleteState, restore, states });
    const model = server.model();
    actions = new Actions({
      api: server as unknown as KernelStateAPI,
      commands: {} as unknown as CommandRegistry,
      model,
      trans
    } as unknown as Actions.IOptions);
  });

  afterEach(async () => {
    await until(() => {
      // The list comes back after a question.
      Dialog.tracker.forEach(dialog => dialog.reject());
      return Dialog.tracker.size === 0 && isOver;
    });
  });

  async function open(): Promise<void> {
    isOver = false;
    void actions.restore({ kernelId: 'K1', path: 'a.ipynb' }).then(() => {
      isOver = true;
    });
    await until(() => listed().length > 0);
  }

  it('lists what is of the notebook or its kernel and nothing else, newest first', async () => {
    await open();
    expect(listed()).toEqual(['S3', 'S2', 'S1']);
  });

  it('asks before it deletes, and Enter alone does not', async () => {
    await open();
    find('.jp-gpu-ckpt-delete')!.click();
    await until(() => title() === 'Delete Saved State?');
    await until(() => document.activeElement?.textContent === 'Cancel');
    press('Enter');
    await until(() => title() === 'Restore Kernel State' && !!listed().length);
    expect(deleteState).not.toHaveBeenCalled();

    find('.jp-gpu-ckpt-delete')!.click();
    await until(() => title() === 'Delete Saved State?');
    find('.jp-mod-warn')!.click();
    await until(() => title() === 'Restore Kernel State' && !!listed().length);
    expect(listed()).toEqual(['S2', 'S1']);
  });

  it('asks before it rolls back', async () => {
    await open();
    await until(
      () => !find<HTMLButtonElement>('.jp-gpu-ckpt-rollback')!.disabled
    );
    find('.jp-gpu-ckpt-rollback')!.click();
    await until(() => title() === 'Roll Back Kernel?');
    press('Escape');
    await until(() => document.querySelector('.jp-Dialog') === null);
    expect(restore).not.toHaveBeenCalled();
  });

  it('leaves Enter to what is in it, and says why its contents cannot be read', async () => {
    await open();
    await until(() => find('summary') !== null);
    const later = jest.fn();
    document
      .querySelector('.jp-Dialog')!
      .addEventListener('keydown', later, true);
    for (const control of ['summary', '.jp-gpu-ckpt-verify']) {
      expect(press('Enter', find(control)!).defaultPrevented).toBe(false);
    }
    expect(later).not.toHaveBeenCalled();
    press('Escape', find('summary')!);
    expect(later).toHaveBeenCalledTimes(1);
  });

  it('says why it cannot be told what is in a state, and what to do', async () => {
    contents.mockRejectedValue(
      new RequestError(422, anError({ message: 'No.', hint: 'Verify it.' }))
    );
    await open();
    const details = find<HTMLDetailsElement>('.jp-gpu-ckpt-disclosure')!;
    details.open = true;
    details.dispatchEvent(new Event('toggle'));
    await until(() => details.querySelector('[role="alert"]') !== null);
    expect(details.textContent).toContain('No. Verify it.');
    expect(find('.jp-mod-error')).toBeNull();
  });
});
