//! Bytes that say where they belong: every word depends on a seed and on its offset.

use anyhow::{Context, Result, bail};
use cuvmm::{Error, VirtualMemoryBuffer};

/// How much is copied at a time.
const PIECE: usize = 4 << 20;

/// The seed of what the first process writes, and of what the second one does.
pub(crate) const FIRST: u64 = 0x0123_4567_89ab_cdef;
pub(crate) const SECOND: u64 = 0xfedc_ba98_7654_3210;

fn fill(piece: &mut [u8], seed: u64, offset: usize) {
    let at = |index: usize| {
        let place = (offset / 8 + index) as u64;
        let value = (place ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ seed;
        value.to_le_bytes()
    };
    let (words, rest) = piece.as_chunks_mut();
    for (index, word) in words.iter_mut().enumerate() {
        *word = at(index);
    }
    let last = at(words.len());
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Writes the pattern to the bytes from `from` to the buffer's end.
pub(crate) fn write(buffer: &VirtualMemoryBuffer, seed: u64, from: usize) -> Result<()> {
    let mut piece = vec![0; PIECE];
    for offset in (from..buffer.size()).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(buffer.size() - offset)];
        fill(piece, seed, offset);
        buffer.copy_from_host(offset, piece).map_err(Error::from).context("failed to write the pattern")?;
    }
    Ok(())
}

/// Compares every byte of the buffer with the pattern, and says how many there were.
pub(crate) fn verify(buffer: &VirtualMemoryBuffer, seed: u64) -> Result<usize> {
    let (mut seen, mut due) = (vec![0; PIECE], vec![0; PIECE]);
    for offset in (0..buffer.size()).step_by(PIECE) {
        let length = PIECE.min(buffer.size() - offset);
        let (seen, due) = (&mut seen[..length], &mut due[..length]);
        buffer.copy_to_host(offset, seen).map_err(Error::from).context("failed to read the pattern back")?;
        fill(due, seed, offset);
        // As a whole first: byte by byte it takes seconds where nothing is optimized.
        if seen != due
            && let Some(index) = seen.iter().zip(&*due).position(|(seen, due)| seen != due)
        {
            bail!("byte {} is {:#04x} and should be {:#04x}", offset + index, seen[index], due[index]);
        }
    }
    Ok(buffer.size())
}
