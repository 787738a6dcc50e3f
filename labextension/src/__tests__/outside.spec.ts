import { nullTranslator } from '@jupyterlab/translation';

import type { IOutside } from '../api';
import {
  closedLine,
  closedTexts,
  hasOutside,
  neededTexts
} from '../dialogs/outside';
import { aConnection } from './fixtures';

const trans = nullTranslator.load('jupyter_gpu_ckpt');

function outside(change: Partial<IOutside>): IOutside {
  return { connections: [], devices: [], files: [], left_out: 0, ...change };
}

describe('what is not in a state', () => {
  it('is connections that will not come back', () => {
    const connections = [
      aConnection(),
      aConnection({ count: 3 }),
      aConnection({ address: 'fd00::5', port: 7000, service: null }),
      aConnection({
        address: '10.0.0.9',
        port: 8050,
        service: null,
        incoming: true,
        count: 2
      })
    ];
    const texts = [
      'connection to 10.0.0.5:5432 (postgresql)',
      '3 connections to 10.0.0.5:5432 (postgresql)',
      'connection to [fd00::5]:7000',
      '2 connections from 10.0.0.9 to port 8050'
    ];
    const some = outside({ connections });
    expect(closedTexts(some, trans)).toEqual(texts);
    expect(neededTexts(some, trans)).toEqual([]);
    expect(closedLine(some, trans)).toBe(
      `Will not come back: ${texts.slice(0, 3).join(', ')} and 1 more`
    );
    expect(closedLine(outside({ connections: [aConnection()] }), trans)).toBe(
      'Will not come back: connection to 10.0.0.5:5432 (postgresql)'
    );
  });

  it('is what a restore has to find', () => {
    const some = outside({
      connections: [
        aConnection({ protocol: 'udp', port: 514, service: 'syslog' }),
        aConnection({ protocol: 'unix', address: '/dev/log', port: null })
      ],
      devices: ['/dev/ttyS0'],
      files: [
        { path: '/home/u/a.log', mode: 'append' },
        { path: '/home/u/b.bin', mode: 'write' },
        { path: '/data/c.npy', mode: 'map' }
      ]
    });
    expect(closedLine(some, trans)).toBeNull();
    expect(neededTexts(some, trans)).toEqual([
      'UDP service 10.0.0.5:514 (syslog)',
      'service /dev/log',
      'device /dev/ttyS0',
      'file /home/u/a.log (appended to)',
      'file /home/u/b.bin (written)',
      'file /data/c.npy (mapped)'
    ]);
  });

  it('is there, or not', () => {
    expect(hasOutside(null)).toBe(false);
    expect(hasOutside(outside({}))).toBe(false);
    expect(hasOutside(outside({ devices: ['/dev/kmsg'] }))).toBe(true);
    expect(hasOutside(outside({ left_out: 1 }))).toBe(true);
  });

  it('may not be known', () => {
    expect(closedLine(null, trans)).toBeNull();
    expect(neededTexts(null, trans)).toEqual([]);
  });
});
