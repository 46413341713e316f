//! A peer, whose deeds are a program in arbitrary bytes.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use cuvmm_ipc::wire::{self, Reply};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::simulated::G;

/// The sizes of the chunks that are there to be shared, one each.
pub(crate) const HONEST: [usize; 4] = [G, 2 * G, 3 * G, 4 * G];
/// The handles that come unasked, and those that a receiver asks for then.
const BATCHES: [usize; 2] = [16, 32];

/// Bytes that say what to do; zeros behind the last.
pub(crate) struct Program<'p>(pub(crate) &'p [u8]);

impl<'p> Program<'p> {
    pub(crate) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn number(&mut self) -> usize {
        usize::from(self.byte())
    }

    fn bytes(&mut self, most: usize) -> &'p [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

/// One end of a socket, and whoever has it.
pub(crate) struct Peer<'s> {
    /// What it can send as handles. The first are handles to memory of the sizes [`HONEST`].
    pub(crate) files: Vec<BorrowedFd<'s>>,
    /// Fabric handles to memory of those sizes.
    pub(crate) fabric: Vec<[u8; 64]>,
    /// The device and the host that are as they should be.
    pub(crate) uuid: [u8; 16],
    pub(crate) host: [u8; 16],
    /// None once it is closed.
    pub(crate) socket: Option<UnixStream>,
    /// All data so far.
    pub(crate) said: Vec<u8>,
    /// The handles, by number, that belong to the last header.
    pub(crate) honest: Vec<usize>,
    /// Whether that said that they are fabric handles.
    pub(crate) is_fabric: bool,
}

impl Peer<'_> {
    /// Does what a sender does, or something else.
    pub(crate) fn run(&mut self, program: &mut Program<'_>) {
        while !program.0.is_empty() {
            match program.byte() % 8 {
                0 => {
                    let length = program.number() % 64;
                    self.say(program.bytes(length), &[]);
                }
                1 | 2 => self.announce_any(program),
                3 | 4 => {
                    let mut files = self.honest.clone();
                    for _ in 0..program.number() % 3 {
                        let (nth, file) = (program.number(), program.number() % self.files.len());
                        let count = files.len().max(1);
                        files.get_mut(nth % count).into_iter().for_each(|place| *place = file);
                    }
                    self.send_honestly(&files);
                }
                5 | 6 => {
                    let (said, count) = (program.number(), program.number() % 40);
                    let said = if said < 128 { count } else { said };
                    let files: Vec<usize> = (0..count).map(|_| program.number() % self.files.len()).collect();
                    self.say(&wire::encode_handles(said), &files);
                }
                _ => self.socket = None,
            }
        }
    }

    /// Sends a header, most often one that is as it should be.
    fn announce_any(&mut self, program: &mut Program<'_>) {
        let chunks = program.number() % 64;
        let mut sizes = vec![G as u64; chunks];
        for _ in 0..program.number() % 8 {
            let (nth, size) = (program.number(), program.byte());
            let size = match size % 16 {
                0 => G as u64 + 1,
                1 => 0,
                2 => u64::MAX - (G as u64 - 1),
                3 => 1 << 40,
                size => u64::from(size % 4 + 1) * G as u64,
            };
            sizes.get_mut(nth).into_iter().for_each(|place| *place = size);
        }
        let sum = sizes.iter().fold(0, |sum: u64, size| sum.wrapping_add(*size));
        let size = match program.byte() {
            0 => sum.wrapping_add(1),
            1 => sum.wrapping_sub(1),
            2 => 1,
            3 => 0,
            _ => sum,
        };
        self.is_fabric = program.number().is_multiple_of(4);
        let mut header = self.header(&sizes, size);
        for _ in 0..program.number() % 3 {
            let (at, byte) = (program.number() % 104, program.byte());
            header.get_mut(at).into_iter().for_each(|place| *place = byte);
        }
        let manner = program.byte();
        if manner == 0 {
            header.truncate(program.number());
        }
        let files = if manner == 1 { vec![program.number() % self.files.len()] } else { Vec::new() };
        self.say(&header, &files);
        let file = |size: &u64| HONEST.iter().position(|honest| *honest as u64 == *size).unwrap_or(0);
        self.honest = sizes.iter().map(file).collect();
    }

    pub(crate) fn announce(&mut self, sizes: &[u64], size: u64) {
        let header = self.header(sizes, size);
        self.say(&header, &[]);
    }

    /// A header by the book, written without the code that is tried.
    fn header(&self, sizes: &[u64], size: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(96 + 8 * sizes.len());
        bytes.extend(b"CUVM\x01\0\0\0");
        bytes.extend((96 + 8 * sizes.len() as u32).to_le_bytes());
        bytes.extend([if self.is_fabric { 8 } else { 1 }, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(self.uuid);
        bytes.extend([0; 24]);
        bytes.extend(self.host);
        bytes.extend(size.to_le_bytes());
        bytes.extend((sizes.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        sizes.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
        bytes
    }

    /// Sends handles in messages as a receiver takes them.
    pub(crate) fn send_honestly(&mut self, files: &[usize]) {
        let (first, rest) = files.split_at(files.len().min(BATCHES[0]));
        for batch in [first].into_iter().chain(rest.chunks(BATCHES[1])) {
            let mut message = wire::encode_handles(batch.len()).to_vec();
            if self.is_fabric {
                // What has the number of no fabric handle is bytes that are none.
                let bytes = |nth: &usize| self.fabric.get(*nth).copied().unwrap_or([*nth as u8; 64]);
                batch.iter().for_each(|nth| message.extend(bytes(nth)));
                self.say(&message, &[]);
            } else {
                self.say(&message, batch);
            }
        }
    }

    /// Does what a receiver does, or something else.
    pub(crate) fn reply(&mut self, program: &mut Program<'_>) {
        while !program.0.is_empty() {
            let kind = program.byte();
            let (low, high) = (program.byte(), program.byte());
            let bytes = match kind % 8 {
                0 => program.bytes(usize::from(low) % 16).to_vec(),
                1 | 2 => vec![1, 0, low, high % 2, 0, 0, 0, 0],
                3 | 4 => Reply::Accepted.encode().to_vec(),
                5 => vec![3, 0, low, high, low, high, 0, 0],
                6 => vec![kind, high, low, high, 0, low, 0, 0],
                _ => {
                    self.socket = None;
                    return;
                }
            };
            let files = if low == high { vec![usize::from(low) % self.files.len()] } else { Vec::new() };
            self.say(&bytes, &files);
        }
    }

    /// Says it, unless the socket takes nothing more.
    fn say(&mut self, bytes: &[u8], files: &[usize]) {
        let Some(socket) = &self.socket else { return };
        let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| self.files[*file]).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Ok(sent) = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            self.said.extend(&bytes[..sent]);
        }
    }
}
