//! Values: numbers, names of variables, and sums of both.

use std::collections::HashMap;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) bits: u64,
    pub(crate) kind: Kind,
}

/// How a value travels to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As its digits.
    Number,
    /// As a duplicate of the descriptor.
    File,
    /// As the 64 bytes that it points at.
    Fabric,
    /// Not at all: a gate's number.
    Gate,
}

impl Value {
    pub(crate) fn number(bits: u64) -> Self {
        Self { bits, kind: Kind::Number }
    }
}

/// Names that always stand for the same value: no address, and the default streams.
const FIXED: &[(&str, u64)] = &[("null", 0), ("legacy", 1), ("per_thread", 2)];

/// Whether a variable can have that name.
pub(crate) fn is_name(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|first| first.is_ascii_lowercase())
        && letters.all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_')
        && text != "host"
        && !FIXED.iter().any(|(fixed, _)| *fixed == text)
}

/// The value of a sum such as `r+2M`, `r-64K`, `0x10`, `-1` or `null`.
pub(crate) fn evaluate(text: &str, variables: &HashMap<String, Value>) -> Result<Value, String> {
    // A sign at the beginning belongs to its number.
    let Some(at) = text.char_indices().skip(1).map(|(at, _)| at).filter(|&at| is_sign(text, at)).last() else {
        return term(text, variables);
    };
    let (left, right) = (evaluate(&text[..at], variables)?, term(&text[at + 1..], variables)?);
    let sum = match text.as_bytes()[at] {
        b'+' => left.bits.wrapping_add(right.bits),
        _ => left.bits.wrapping_sub(right.bits),
    };
    Ok(Value::number(sum))
}

fn is_sign(text: &str, at: usize) -> bool {
    matches!(text.as_bytes()[at], b'+' | b'-')
}

fn term(text: &str, variables: &HashMap<String, Value>) -> Result<Value, String> {
    if let Some(value) = variables.get(text) {
        return Ok(*value);
    }
    if let Some((_, value)) = FIXED.iter().find(|(fixed, _)| *fixed == text) {
        return Ok(Value::number(*value));
    }
    number(text).map(Value::number).ok_or_else(|| format!("neither a number nor a variable with a value: {text}"))
}

fn number(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix('-') {
        return number(digits).map(u64::wrapping_neg);
    }
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok();
    }
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K') => (&text[..at], 10),
        (at, 'M') => (&text[..at], 20),
        (at, 'G') => (&text[..at], 30),
        (at, 'T') => (&text[..at], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        let variables = HashMap::from([("r".to_owned(), Value::number(0x1000_0000))]);
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(evaluate(text, &variables).ok().map(|value| value.bits), expect, "{text}");
        };
        check("7", Some(7));
        check("0x1f", Some(31));
        check("64K", Some(64 << 10));
        check("64T", Some(64 << 40));
        check("-1", Some(u64::MAX));
        check("null", Some(0));
        check("per_thread", Some(2));
        check("r", Some(0x1000_0000));
        check("r+2M", Some(0x1020_0000));
        check("r-64K+4", Some(0x0fff_0004));
        check("r+", None);
        check("s", None);
        check("2X", None);
        check("", None);
        check("17179869184G", None);
    }

    #[test]
    fn names() {
        let check = |text: &str, expect: bool| assert_eq!(is_name(text), expect, "{text}");
        check("r", true);
        check("second_map2", true);
        check("2r", false);
        check("null", false);
        check("host", false);
        check("R", false);
        check("", false);
    }
}
