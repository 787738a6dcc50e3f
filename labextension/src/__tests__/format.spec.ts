import { nullTranslator } from '@jupyterlab/translation';

import {
  formatAge,
  formatName,
  formatPercent,
  formatSeconds,
  formatSize
} from '../format';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

describe('formatSize', () => {
  it.each([
    [0, '0 bytes'],
    [1, '1 byte'],
    [999, '999 bytes'],
    [999_600, '1 MB'],
    [118_000_000, '118 MB'],
    [2_340_000_000, '2.34 GB'],
    [5e15, '5,000 TB']
  ])('%d is %s', (bytes, text) => {
    expect(formatSize(bytes)).toBe(text);
  });
});

describe('formatSeconds', () => {
  it.each([
    [0.04, '0 s'],
    [1.24, '1.2 s'],
    [75.4, '75 s']
  ])('%d is %s', (seconds, text) => {
    expect(formatSeconds(seconds)).toBe(text);
  });
});

describe('formatPercent', () => {
  it('stays between 0 and 100', () => {
    expect(formatPercent(-1)).toBe('0%');
    expect(formatPercent(0.424)).toBe('42%');
    expect(formatPercent(7)).toBe('100%');
  });
});

describe('formatAge', () => {
  const ago = (seconds: number) =>
    new Date(Date.now() - seconds * 1000).toISOString();

  it('does not count seconds', () => {
    expect(formatAge(ago(59), trans)).toBe('just now');
  });

  it('takes a server clock ahead of the browser for now', () => {
    expect(formatAge(ago(-30), trans)).toBe('just now');
  });

  it('counts minutes, hours and days', () => {
    expect(formatAge(ago(125), trans)).toBe('2 minutes ago');
    expect(formatAge(ago(125), trans, 'narrow')).toBe('2 min. ago');
    expect(formatAge(ago(3 * 3600 + 5), trans)).toBe('3 hours ago');
  });
});

describe('formatName', () => {
  it.each([
    ['folder/a.ipynb', 'a.ipynb'],
    ['console-2-cd932d9e-d39d-4df9-82f7-30857b853434', 'Console 2'],
    ['f/console-12-cd932d9e-d39d-4df9-82f7-30857b853434', 'Console 12'],
    ['console-1-notes.py', 'console-1-notes.py']
  ])('%s is %s', (path, name) => {
    expect(formatName(path, trans)).toBe(name);
  });
});
