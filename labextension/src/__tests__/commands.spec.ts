import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import { CommandRegistry } from '@lumino/commands';

import type { Actions } from '../actions';
import { CommandIDs, addCommands } from '../commands';
import type { LostKernels } from '../lost';
import { Server } from './fixtures';

const trans = nullTranslator.load('');
const CATEGORY = trans.__('Kernel Operations');
const ALL = Object.values(CommandIDs);

interface IItem {
  command?: string;
  rank: number;
}
const menus = jest.requireActual<{
  'jupyter.lab.menus': { main: { items: IItem[] }[]; context: IItem[] };
}>('../../schema/plugin.json')['jupyter.lab.menus'];

describe('The commands', () => {
  const actions = { restore: jest.fn(), save: jest.fn() };
  const commands = new CommandRegistry();
  const palette = { addItem: jest.fn() };
  const model = new Server().model();
  let inFront: object | null = null;
  let underMenu: HTMLElement | undefined;

  beforeAll(() =>
    addCommands({
      actions: actions as unknown as Actions,
      app: {
        commands,
        shell: {
          get currentWidget() {
            return inFront;
          }
        },
        contextMenuHitTest: () => underMenu
      } as unknown as JupyterFrontEnd,
      lost: { show: jest.fn() } as unknown as LostKernels,
      model,
      palette: palette as unknown as ICommandPalette,
      trans
    })
  );

  it.each(ALL)('%s says what it does, and what it takes', async command => {
    expect(commands.label(command)).toMatch(/^([A-Z][A-Za-z]* ?)+…?$/);
    expect(commands.caption(command)).not.toBe('');
    const { args } = await commands.describedBy(command);
    expect(args).toHaveProperty('properties');
    expect(palette.addItem).toHaveBeenCalledWith(
      expect.objectContaining({ command, category: CATEGORY })
    );
  });

  it('that ask for more before they do something end with an ellipsis', () => {
    const asking = ALL.filter(id => commands.label(id).endsWith('…'));
    expect(asking).toEqual([CommandIDs.restore, CommandIDs.showLost]);
  });

  it('are all in the Kernel menu, and those of one kernel in the Running panel', () => {
    const named = (items: IItem[]) =>
      items.flatMap(({ command }) => command ?? []);
    expect(named(menus.main[0].items).sort()).toEqual([...ALL].sort());
    const ofOne = ALL.filter(id => id !== CommandIDs.showLost);
    expect(named(menus.context).sort()).toEqual([...ofOne].sort());
    const ranks = menus.main[0].items.map(({ rank }) => rank);
    expect([...ranks].sort()).toEqual(ranks);
  });

  it('act on the notebook in front, or on the kernel that was pointed at', async () => {
    expect(commands.isEnabled(CommandIDs.restore)).toBe(false);
    inFront = {
      sessionContext: { path: 'a.ipynb', session: { kernel: { id: 'K1' } } }
    };
    await commands.execute(CommandIDs.save);
    expect(actions.save).toHaveBeenLastCalledWith('K1');
    await commands.execute(CommandIDs.restore);
    expect(actions.restore).toHaveBeenLastCalledWith({
      kernelId: 'K1',
      path: 'a.ipynb'
    });

    const args = { runningPanel: true };
    expect(commands.isEnabled(CommandIDs.save, args)).toBe(false);
    underMenu = document.createElement('li');
    underMenu.dataset.context = 'K2';
    await commands.execute(CommandIDs.save, args);
    expect(actions.save).toHaveBeenLastCalledWith('K2');
    await commands.execute(CommandIDs.restore, args);
    expect(actions.restore).toHaveBeenLastCalledWith({
      kernelId: 'K2',
      path: null
    });
  });
});
