//! The checksum of HDF5's metadata: Jenkins' lookup3.

/// Of these bytes.
pub(super) fn lookup3(bytes: &[u8]) -> u32 {
    let start = 0xdead_beef_u32.wrapping_add(bytes.len() as u32);
    let (mut a, mut b, mut c) = (start, start, start);
    let mut rest = bytes;
    while rest.len() > 12 {
        let (block, behind) = rest.split_at(12);
        rest = behind;
        add(&mut a, &mut b, &mut c, block);
        (a, b, c) = mix(a, b, c);
    }
    if rest.is_empty() {
        return c;
    }
    add(&mut a, &mut b, &mut c, rest);
    finish(a, b, c)
}

fn add(a: &mut u32, b: &mut u32, c: &mut u32, block: &[u8]) {
    for (at, byte) in block.iter().enumerate() {
        let value = u32::from(*byte) << (8 * (at % 4));
        let word = match at / 4 {
            0 => &mut *a,
            1 => &mut *b,
            _ => &mut *c,
        };
        *word = word.wrapping_add(value);
    }
}

fn mix(mut a: u32, mut b: u32, mut c: u32) -> (u32, u32, u32) {
    for [first, second, third] in [[4, 6, 8], [16, 19, 4]] {
        a = a.wrapping_sub(c) ^ c.rotate_left(first);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(second);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(third);
        b = b.wrapping_add(a);
    }
    (a, b, c)
}

fn finish(mut a: u32, mut b: u32, mut c: u32) -> u32 {
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_jenkins_own() {
        assert_eq!(super::lookup3(b""), 0xdead_beef);
        assert_eq!(super::lookup3(b"Four score and seven years ago"), 0x1777_0551);
    }
}
