import type { IRestoredFrom } from '../api';
import type { IRanCell } from '../gap';
import { undoneCells } from '../gap';
import { aRestoredFrom } from './fixtures';

const FROM = aRestoredFrom({
  created: '2026-01-01T12:00:00Z',
  restored: '2026-01-01T13:00:00Z',
  cause: 'death',
  execution_count: 3
});

function cell(
  id: string,
  count: number | null,
  more: Partial<IRanCell> = {}
): IRanCell {
  return { id, count, source: id, ran: null, ...more };
}

/** The ids of the cells that are undone. */
function undone(
  cells: IRanCell[],
  from: Partial<IRestoredFrom> = {},
  history: [number, string][] | null = null
): string[] {
  const known = history && new Map(history);
  return undoneCells(cells, { ...FROM, ...from }, known).map(({ id }) => id);
}

describe('undoneCells', () => {
  it('are those with a higher counter than the state, in their order', () => {
    const cells = [cell('a', 1), cell('b', 5), cell('c', null), cell('d', 4)];
    expect(undone(cells)).toEqual(['d', 'b']);
  });

  it('are all where no cell had run yet', () => {
    expect(undone([cell('a', 1)], { execution_count: null })).toEqual(['a']);
  });

  it('does not have the cell that ran during the save', () => {
    const running = { execution_count: 3, in_flight_msg_id: 'm1' };
    expect(undone([cell('a', 3), cell('b', 4)], running)).toEqual(['b']);
  });

  it('does not have cells of an earlier kernel', () => {
    const cells = [cell('a', 4), cell('old', 27), cell('again', 5)];
    const other_counts = { old: 27, again: 28 };
    expect(undone(cells, { other_counts })).toEqual(['a', 'again']);
    expect(undone(cells, { last_execution_count: 4 })).toEqual(['a']);
  });

  it('asks the times that the notebook has recorded', () => {
    const cells = [
      cell('before', 9, { ran: '2026-01-01T11:59:00.5Z' }),
      cell('between', 4, { ran: '2026-01-01T12:30:00Z' }),
      cell('since', 5, { ran: '2026-01-01T13:30:00Z' })
    ];
    expect(undone(cells)).toEqual(['between']);
  });

  it('has the cells that ran while the state was being stored', () => {
    const state_id = '20260101T115930Z-0a1b2c3d';
    const cells = [
      cell('before', 9, { ran: '2026-01-01T11:59:29.9Z' }),
      cell('meanwhile', 4, { ran: '2026-01-01T11:59:31Z' })
    ];
    expect(undone(cells, { state_id })).toEqual(['meanwhile']);
  });

  it('does not have what was run again and then edited', () => {
    const cells = [cell('a', 4, { source: 'a, edited' }), cell('b', 5)];
    expect(undone(cells, {}, [[4, 'a']])).toEqual(['b']);
  });

  it('does not have what the kernel has run again', () => {
    const cells = [cell('a', 4), cell('b', 5)];
    expect(undone(cells, {}, [])).toEqual(['a', 'b']);
    expect(undone(cells, {}, [[4, 'a\n']])).toEqual(['b']);
    // Another cell has this counter now.
    const twin = [...cells, cell('c', 4)];
    expect(undone(twin, {}, [[4, 'c']])).toEqual(['a', 'b']);
  });

  it('judges a cell that was edited since by its counter', () => {
    const cells = [cell('a', 2, { source: 'new' }), cell('b', 4)];
    expect(undone(cells, {}, [[4, 'b']])).toEqual([]);
  });
});
