//! Bundles of TensorFlow, whose checksums no fuzzer would find.

use std::path::Path;

use formats::{ChangedTensor, Tensor, describe_at};

/// The entries of a bundle's index, their length in two bytes before them, and a file with tensors. The index gets its checksums here.
pub(crate) fn bundle(data: &[u8]) {
    let Some((len, rest)) = data.split_first_chunk() else { return };
    let Some((entries, data)) = rest.split_at_checked(usize::from(u16::from_le_bytes(*len))) else { return };
    let (mut index, end) = (Vec::new(), [0, 0, 0, 0, 1, 0, 0, 0]);
    let handle = put_block(&[entries, &end].concat(), &mut index);
    let root = put_block(&[&[0, 1, handle.len() as u8, b'z'], &handle[..], &end].concat(), &mut index);
    let mut footer = [&[0, 0], &root[..]].concat();
    footer.resize(40, 0);
    index.extend(footer);
    index.extend(0xdb47_7524_8b80_fb57u64.to_le_bytes());
    let path = Path::new("a.data-00000-of-00001");
    let mut d = describe_at(path, &data, |_| Ok(&*index)).expect("bytes in memory have no errors of a device");
    d.hold_unsteady(&data).expect("bytes in memory have no errors of a device");
    let size = |t: &Tensor| t.shape.iter().product::<u64>() * t.dtype.size() as u64;
    let mut last = 0;
    for (index, tensor) in d.tensors.iter().enumerate() {
        assert!(tensor.extent.start >= last && tensor.extent.end > tensor.extent.start, "disjoint and ascending");
        last = tensor.extent.start + size(tensor);
        assert!(last <= data.len() as u64);
        assert!([tensor.of, tensor.partner].into_iter().flatten().all(|other| d.tensors[other].shape == tensor.shape));
        if !tensor.lossless {
            // Whatever the rest of a tensor becomes, its CRC stays.
            let changed = ChangedTensor { index, crc_before: 0x1234_5678, crc_after: data.len() as u32 };
            let patches = d.patches(&data, &[changed]).expect("its tail is steady");
            assert!(patches.iter().all(|patch| patch.offset == tensor.extent.end));
            let effect = |bytes: &[u8]| crc32c(bytes) ^ crc32c(&vec![0; bytes.len()]);
            let before = &data[tensor.extent.end as usize..last as usize];
            // The first four bytes of a tail do as much as the CRC of all before it.
            let rest =
                [&(changed.crc_before ^ changed.crc_after).to_le_bytes(), &vec![0; before.len() - 4][..]].concat();
            assert_eq!(effect(before) ^ effect(&patches[0].bytes), effect(&rest));
        }
    }
}

/// Appends a block with its checksum; returns its place.
fn put_block(block: &[u8], out: &mut Vec<u8>) -> Vec<u8> {
    let mut handle = Vec::new();
    for mut number in [out.len(), block.len()] {
        while number >= 0x80 {
            handle.push(number as u8 | 0x80);
            number >>= 7;
        }
        handle.push(number as u8);
    }
    let checked = [block, &[0]].concat();
    out.extend(&checked);
    out.extend(crc32c(&checked).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes());
    handle
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
