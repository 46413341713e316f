//! [`Range`]: contiguous mappings, as an immutable chain that buffers share.
//!
//! Each node holds one mapping and its parent, so that a grow shares the old nodes and adds one, whatever their
//! number. Nodes are let go of iteratively, the last first.

use cuvmm_driver::sys::{CUdeviceptr, CUmemAccessDesc};
use cuvmm_handles::{Mapping, Reservation};

use crate::kept::{Kept, Piece};
use crate::sync::Arc;

/// Contiguous mappings, from the first to the one that this names; possibly none. A clone shares them all.
#[derive(Clone, Default)]
pub(crate) struct Range {
    tail: Option<Arc<Node>>,
}

struct Node {
    /// Everything before `mapping`. Held bare rather than as a `Range`, so that no drop recurses.
    parent: Option<Arc<Node>>,
    mapping: Mapping,
    /// What keeps its memory when nobody else has it any more; none where that is released.
    kept: Option<Arc<Kept>>,
    /// Where the whole range begins.
    base: CUdeviceptr,
    /// Bytes from there to the end of `mapping`.
    end: usize,
    /// Mappings up to and with this one.
    count: usize,
    /// What each of those is granted.
    common: Arc<[CUmemAccessDesc]>,
}

impl Range {
    /// This range with one mapping more, which begins where it ends, and what is to keep its memory.
    pub(crate) fn with(mut self, mapping: Mapping, kept: Option<Arc<Kept>>) -> Self {
        let (base, end, count, common) = match &self.tail {
            Some(tail) => (tail.base, tail.end, tail.count, in_both(&tail.common, mapping.access())),
            None => (mapping.address(), 0, 0, Arc::clone(mapping.access())),
        };
        // The sum is bounded by the address space that the mappings lie in.
        let end = end.saturating_add(mapping.size());
        let node = Node { parent: self.tail.take(), mapping, kept, base, end, count: count + 1, common };
        Self { tail: Some(Arc::new(node)) }
    }

    /// A number of the mapping that it ends in, no other mapping's as long as it is there; none for no mappings.
    pub(crate) fn key(&self) -> Option<usize> {
        self.tail.as_deref().map(|tail| std::ptr::from_ref(tail).addr())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tail.is_none()
    }

    /// Where it begins; 0 for no mappings.
    pub(crate) fn base(&self) -> CUdeviceptr {
        self.tail.as_ref().map_or(CUdeviceptr(0), |tail| tail.base)
    }

    /// How long it is, in bytes.
    pub(crate) fn end(&self) -> usize {
        self.tail.as_ref().map_or(0, |tail| tail.end)
    }

    /// How many mappings it has.
    pub(crate) fn count(&self) -> usize {
        self.tail.as_ref().map_or(0, |tail| tail.count)
    }

    /// The first mapping.
    pub(crate) fn first(&self) -> Option<&Mapping> {
        let mut node = self.tail.as_ref()?;
        while let Some(parent) = &node.parent {
            node = parent;
        }
        Some(&node.mapping)
    }

    /// The last mapping.
    pub(crate) fn last(&self) -> Option<&Mapping> {
        self.tail.as_ref().map(|tail| &tail.mapping)
    }

    /// Its mappings in address order.
    pub(crate) fn mappings(&self) -> Vec<&Mapping> {
        self.in_order(|node| &node.mapping)
    }

    /// As [`mappings`](Self::mappings), with what keeps the memory of each.
    pub(crate) fn kept_mappings(&self) -> Vec<(&Mapping, Option<&Arc<Kept>>)> {
        self.in_order(|node| (&node.mapping, node.kept.as_ref()))
    }

    fn in_order<'a, T>(&'a self, of: impl Fn(&'a Node) -> T) -> Vec<T> {
        let mut all = Vec::with_capacity(self.count());
        let mut next = self.tail.as_ref();
        while let Some(node) = next {
            all.push(of(node));
            next = node.parent.as_ref();
        }
        all.reverse();
        all
    }

    /// Whether every mapping that the bytes from `start` to `end` lie in has such access. As a rule all mappings have the
    /// same, and what they have in common tells: the number of them does not matter.
    pub(crate) fn is_granted(&self, start: usize, end: usize, is_such: impl Fn(&[CUmemAccessDesc]) -> bool) -> bool {
        let mut next = self.tail.as_ref();
        if next.is_some_and(|tail| is_such(&tail.common)) {
            return end <= self.end();
        }
        while let Some(node) = next.filter(|node| node.end > start) {
            if node.end - node.mapping.size() < end && !is_such(node.mapping.access()) {
                return false;
            }
            next = node.parent.as_ref();
        }
        end <= self.end()
    }

    /// Those of its mappings, from the first, that begin before `bytes` bytes from its base.
    pub(crate) fn prefix(&self, bytes: usize) -> Self {
        let mut tail = &self.tail;
        while let Some(node) = tail
            && node.end - node.mapping.size() >= bytes
        {
            tail = &node.parent;
        }
        Self { tail: tail.clone() }
    }

    /// Lets go of it: each mapping that nobody else shares is closed, the last first, and its memory kept where it may be.
    /// Goes on past failures and returns the first.
    pub(crate) fn close(mut self) -> Result<(), cuvmm_handles::Error> {
        self.tear_down(&mut Piece::whole())
    }

    /// As [`close`](Self::close), and lets go of the addresses that a buffer without memory has.
    pub(crate) fn close_with(self, reserved: Option<Arc<Reservation>>) -> Result<(), cuvmm_handles::Error> {
        let closed = self.close();
        closed.and(reserved.and_then(Arc::into_inner).map_or(Ok(()), Reservation::close))
    }

    /// As [`close`](Self::close), until a piece is given back: then it has what is left.
    pub(crate) fn tear_down(&mut self, piece: &mut Piece) -> Result<(), cuvmm_handles::Error> {
        let mut first = Ok(());
        while !piece.is_used_up()
            && let Some(Node { parent, mapping, kept, .. }) = self.tail.take().and_then(Arc::into_inner)
        {
            // Put back before anything can unwind, so that what is left is let go of as iteratively.
            self.tail = parent;
            first = first.and(match kept {
                Some(kept) => kept.end(mapping, piece),
                None => {
                    piece.add(mapping.size());
                    mapping.close()
                }
            });
        }
        // What is left is this one's alone: what others share is theirs.
        self.tail = self.tail.take().and_then(Arc::into_inner).map(Arc::new);
        first
    }
}

/// What is in both of these.
fn in_both(one: &Arc<[CUmemAccessDesc]>, other: &Arc<[CUmemAccessDesc]>) -> Arc<[CUmemAccessDesc]> {
    if Arc::ptr_eq(one, other) || one.iter().all(|desc| other.contains(desc)) {
        return Arc::clone(one);
    }
    one.iter().filter(|desc| other.contains(desc)).copied().collect()
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.is_empty() {
            return;
        }
        // Failures were counted and reported by the handles.
        let _ = self.tear_down(&mut Piece::whole());
    }
}
