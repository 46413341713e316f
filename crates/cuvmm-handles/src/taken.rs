//! [`Taken`]: which parts of a range are taken.

/// Parts of a range that are taken. Those that touch are one: a range that is filled has one part, however many rooms there
/// are, and what a room costs does not depend on their number.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Where each part begins, and where it ends, by address. None is empty, and no two overlap or touch.
    parts: Vec<(usize, usize)>,
}

impl Taken {
    /// Takes from `start` to `end`, which is behind it; nothing, where any of that is taken.
    pub(crate) fn take(&mut self, start: usize, end: usize) -> bool {
        let index = self.parts.partition_point(|(first, _)| *first < end);
        let (before, behind) = self.parts.split_at_mut(index);
        let before = before.last_mut();
        if before.as_ref().is_some_and(|(_, last)| *last > start) {
            return false;
        }
        let before = before.filter(|(_, last)| *last == start);
        let behind = behind.first_mut().filter(|(first, _)| *first == end);
        match (before, behind) {
            (Some(before), Some(behind)) => {
                before.1 = behind.1;
                self.parts.remove(index);
            }
            (Some(before), None) => before.1 = end,
            (None, Some(behind)) => behind.0 = start,
            (None, None) => self.parts.insert(index, (start, end)),
        }
        true
    }

    /// Gives back from `start` to `end`, which was taken at once, or is a piece of that: so all of it is in one part.
    pub(crate) fn give_back(&mut self, start: usize, end: usize) {
        let behind = self.parts.partition_point(|(first, _)| *first <= start);
        let Some(part) = self.parts[..behind].last_mut() else { return };
        let last = part.1;
        match (part.0 < start, end < last) {
            (true, true) => {
                part.1 = start;
                self.parts.insert(behind, (end, last));
            }
            (true, false) => part.1 = start,
            (false, true) => part.0 = end,
            (false, false) => {
                self.parts.remove(behind - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_behind_another_is_one_part_with_it() {
        let mut taken = Taken::default();
        for room in 0..1000 {
            assert!(taken.take(room, room + 1));
        }
        assert_eq!(taken.parts, [(0, 1000)]);
        for room in (1..1000).rev() {
            taken.give_back(room, room + 1);
        }
        assert_eq!(taken.parts, [(0, 1)]);
    }

    #[test]
    fn what_fills_a_hole_is_one_part_with_what_is_before_and_behind() {
        for order in [[0, 2, 1], [2, 0, 1], [2, 1, 0], [1, 2, 0]] {
            let mut taken = Taken::default();
            assert!(order.into_iter().all(|room| taken.take(room, room + 1)), "{order:?}");
            assert_eq!(taken.parts, [(0, 3)], "{order:?}");
        }
    }

    #[test]
    fn overlaps_are_refused_and_change_nothing() {
        let mut taken = Taken::default();
        assert!(taken.take(4, 6) && taken.take(6, 8) && taken.take(10, 12));
        for (start, end) in [(0, 5), (4, 6), (5, 7), (7, 11), (11, 12), (8, 11), (0, 20)] {
            assert!(!taken.take(start, end), "{start}..{end}");
        }
        assert_eq!(taken.parts, [(4, 8), (10, 12)]);
    }

    /// Against a list of which is whose, by numbers that are the same every time.
    #[test]
    fn rooms_that_come_and_go_in_any_order_are_kept_apart() {
        const END: usize = 40;
        let (mut taken, mut owners, mut rooms) = (Taken::default(), [false; END], Vec::new());
        let mut seed = 1_u32;
        let mut next = |below: usize| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) as usize % below
        };
        for _ in 0..20_000 {
            let start = next(END);
            let end = start + 1 + next((END - start).min(6));
            let is_free = owners[start..end].iter().all(|owned| !owned);
            assert_eq!(taken.take(start, end), is_free, "{start}..{end} of {taken:?}");
            if is_free {
                owners[start..end].fill(true);
                rooms.push((start, end));
            }
            if next(3) > 0 && !rooms.is_empty() {
                let (start, end) = rooms.swap_remove(next(rooms.len()));
                // Now and then in two pieces.
                let middle = start + next(end - start);
                for (start, end) in [(start, middle), (middle, end)].into_iter().filter(|(start, end)| start < end) {
                    taken.give_back(start, end);
                }
                owners[start..end].fill(false);
            }
            let begins = (0..END).filter(|&place| owners[place] && (place == 0 || !owners[place - 1]));
            let parts = begins.map(|start| (start, (start..END).find(|&place| !owners[place]).unwrap_or(END)));
            assert_eq!(taken.parts, Vec::from_iter(parts));
        }
    }
}
