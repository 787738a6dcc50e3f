import { PathExt, Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';

const UNITS = ['byte', 'kilobyte', 'megabyte', 'gigabyte', 'terabyte'];

function language(): string {
  return document.documentElement.lang || 'en';
}

/** A size in words: `118 MB`. Three significant digits, powers of 1000. */
export function formatSize(bytes: number): string {
  let value = bytes;
  let unit = 0;
  // 999.5 would be shown as 1,000 of the smaller unit.
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return new Intl.NumberFormat(language(), {
    style: 'unit',
    unit: UNITS[unit],
    unitDisplay: unit === 0 ? 'long' : 'short',
    maximumSignificantDigits: 3
  }).format(value);
}

/** A duration in words: `1.2 s`. */
export function formatSeconds(seconds: number): string {
  return new Intl.NumberFormat(language(), {
    style: 'unit',
    unit: 'second',
    unitDisplay: 'short',
    maximumFractionDigits: seconds < 10 ? 1 : 0
  })
    .format(seconds)
    .replace(/sec$/, 's');
}

/** A fraction of 1 in words: `42%`. */
export function formatPercent(fraction: number): string {
  return new Intl.NumberFormat(language(), {
    style: 'percent',
    maximumFractionDigits: 0
  }).format(Math.min(Math.max(fraction, 0), 1));
}

/**
 * How long ago something was: `just now`, `5 minutes ago`.
 *
 * @param style - `narrow` for the toolbar, where space is short
 */
export function formatAge(
  when: string,
  trans: TranslationBundle,
  style: 'long' | 'narrow' = 'long'
): string {
  // Also where the server's clock is a little ahead of the browser's.
  if (Date.now() - new Date(when).getTime() < 60_000) {
    return trans.__('just now');
  }
  return Time.formatHuman(when, style === 'narrow' ? 'short' : 'long');
}

/** The time of day, with the date where it is another than today. */
export function formatTime(when: string): string {
  const date = new Date(when);
  const today = date.toDateString() === new Date().toDateString();
  return new Intl.DateTimeFormat(language(), {
    dateStyle: today ? undefined : 'medium',
    timeStyle: 'short'
  }).format(date);
}

/** What pages call the session of a console that belongs to no file. */
const CONSOLE = /^console-(\d+)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;

/** The name of a notebook or console, as its tab shows it. */
export function formatName(path: string, trans: TranslationBundle): string {
  const name = PathExt.basename(path);
  const number = CONSOLE.exec(name)?.[1];
  return number ? trans.__('Console %1', number) : name;
}
