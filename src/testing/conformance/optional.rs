//! What a store may name in its capability; what it does not name must answer `Unsupported`.

use super::once::{
    fold_marks, fold_race, fold_refused, once_counts, once_late_poison, once_poison, once_race,
    once_refused, turns_left_open, turns_of_adds, turns_of_holds, turns_of_poisons,
};
use super::signals::{
    publish_all, publish_cancel, publish_order, replica_catches_up, shard_stable,
};
use super::stock::{end_bars, end_once, holds_all, take_hold, take_race, take_short};
use super::tokens::{
    token_back, token_barred, token_popped, token_race, tokens_pushed, tokens_told,
};
use super::{Cx, Report, Seen, ok, refused, same};
use crate::store::{Capability, End, Store, Version};
use crate::{Error, ErrorKind, Key};
use bytes::Bytes;

pub(super) async fn run<S: Store>(cx: &Cx<S>, report: &mut Report) {
    let can = report.capability;
    writes(cx, report, can).await;
    counters(cx, report, can).await;
    rest(cx, report, can).await;
}

async fn writes<S: Store>(cx: &Cx<S>, report: &mut Report, can: Capability) {
    if can.compare_and_set {
        checks!(report, cx, "compare_and_set":
            "sets when the value is the expected one, else not" => cas_expected,
            "sets with a ttl" => cas_ttl,
            "of many that expect absence one wins" => cas_race,
            "increments by it are all counted" => cas_loop,
        );
    } else {
        checks!(report, cx, "compare_and_set": "not named, so unsupported" => no_cas);
    }
    if can.put_if_newer {
        checks!(report, cx, "put_if_newer":
            "older and equal versions never replace a newer one" => newer_order,
            "an incarnation outranks any number" => newer_incarnation,
            "in any order the newest is left" => newer_race,
            "its values expire, and an expired version is forgotten" => newer_ttl,
            "what another operation wrote is older than every version" => newer_plain,
        );
    } else {
        checks!(report, cx, "put_if_newer": "not named, so unsupported" => no_newer);
    }
    if can.claim_lane && can.put_if_newer {
        checks!(report, cx, "claim_lane":
            "raises the incarnation, keeps the bytes, fences the old writer" => lane_claim,
            "concurrent claims get different incarnations" => lane_race,
        );
    } else if !can.claim_lane {
        checks!(report, cx, "claim_lane": "not named, so unsupported" => no_lane);
    }
    if can.version {
        checks!(report, cx, "version": "a later put has a later version" => version_grows);
    }
}

async fn counters<S: Store>(cx: &Cx<S>, report: &mut Report, can: Capability) {
    if can.seal {
        checks!(report, cx, "seal":
            "a sealed counter refuses adds and reads the same" => seal_closes,
            "sealing twice with one tag is harmless, with another refused" => seal_twice,
            "opens by its own tag only, and counts again" => seal_open,
            "an absent counter seals at zero" => seal_absent,
            "what is no number is refused and kept" => seal_wrong,
            "no add is acknowledged beyond the sealed total" => seal_race,
        );
    } else {
        checks!(report, cx, "seal": "not named, so unsupported" => no_seal);
    }
    if can.add_once {
        checks!(report, cx, "add_once":
            "an id counts once, another again" => once_counts,
            "a poisoned id never counts" => once_poison,
            "an id that counted cannot be poisoned" => once_late_poison,
            "of many with one id one counts" => once_race,
            "a refused add does not use up its id" => once_refused,
            "an id counts once a turn, and not in a turn that is over" => turns_of_adds,
            "a poisoned turn never counts, the next one does" => turns_of_poisons,
        );
    } else {
        checks!(report, cx, "add_once": "not named, so unsupported" => no_once);
    }
    if can.fold {
        checks!(report, cx, "fold":
            "counts once and leaves a mark in the same step" => fold_marks,
            "of many with one id one counts" => fold_race,
            "a refused fold leaves no mark" => fold_refused,
        );
    } else {
        checks!(report, cx, "fold": "not named, so unsupported" => no_fold);
    }
    if can.take {
        checks!(report, cx, "take":
            "takes what is there and no more" => take_short,
            "a hold takes once and hears the same" => take_hold,
            "a hold ends once, and what goes back goes back once" => end_once,
            "a hold that was put back or barred takes nothing" => end_bars,
            "every hold is told" => holds_all,
            "a hold takes once a turn, and nothing in a turn that is over" => turns_of_holds,
            "a hold that is open when its next turn begins stays among the holds" => turns_left_open,
            "never oversells" => take_race,
        );
    } else {
        checks!(report, cx, "take": "not named, so unsupported" => no_take);
    }
    if can.tokens && can.take {
        checks!(report, cx, "tokens":
            "a batch of tokens is pushed once" => tokens_pushed,
            "a hold pops one token and hears the same" => token_popped,
            "a token that is put back is handed out again, once, and one that is used is not" => token_back,
            "a barred hold gets no token" => token_barred,
            "every hold is told with its token" => tokens_told,
            "no token is handed out twice" => token_race,
        );
    } else if !can.tokens {
        checks!(report, cx, "tokens": "not named, so unsupported" => no_tokens);
    }
}

async fn rest<S: Store>(cx: &Cx<S>, report: &mut Report, can: Capability) {
    if can.publish {
        checks!(report, cx, "publish":
            "messages arrive in order, at their channel only" => publish_order,
            "all subscribers hear, later ones only what is later" => publish_all,
            "a dropped wait loses no message" => publish_cancel,
        );
    } else {
        checks!(report, cx, "publish": "not named, so unsupported" => no_publish);
    }
    if can.replicas {
        checks!(report, cx, "replicas": "a replica catches up" => replica_catches_up);
    } else {
        checks!(report, cx, "replicas": "not named, so unsupported" => no_replica);
    }
    if can.shard_of {
        checks!(report, cx, "shard_of": "a key stays on its shard" => shard_stable);
    } else {
        checks!(report, cx, "shard_of": "not named, so none" => no_shard);
    }
}

pub(super) async fn clean<S: Store>(cx: &Cx<S>, key: &Key) {
    drop(cx.store.delete_many(std::slice::from_ref(key)).await);
}

async fn no_cas<S: Store>(cx: Cx<S>) -> Seen {
    let got = cx.store.compare_and_set(&cx.key("x"), None, "1".into(), None).await;
    refused("compare_and_set", got, ErrorKind::Unsupported)
}

async fn no_newer<S: Store>(cx: Cx<S>) -> Seen {
    let got = cx.store.put_if_newer(&cx.key("x"), Version::seq(1), "1".into(), None).await;
    refused("put_if_newer", got, ErrorKind::Unsupported)
}

async fn no_lane<S: Store>(cx: Cx<S>) -> Seen {
    refused("claim_lane", cx.store.claim_lane(&cx.key("x")).await, ErrorKind::Unsupported)
}

async fn no_seal<S: Store>(cx: Cx<S>) -> Seen {
    refused("seal", cx.store.seal(&cx.key("x"), 1).await, ErrorKind::Unsupported)?;
    refused("open", cx.store.open(&cx.key("x"), 1).await, ErrorKind::Unsupported)
}

async fn no_once<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("x"), cx.id("id"));
    refused("add_once", cx.store.add_once(&key, &id, 1).await, ErrorKind::Unsupported)?;
    refused("poison_once", cx.store.poison_once(&key, &id).await, ErrorKind::Unsupported)
}

async fn no_fold<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("x"), cx.key("id"));
    refused("fold", cx.store.fold(&key, &id, 1).await, ErrorKind::Unsupported)?;
    refused("folded", cx.store.folded(&key, &id).await, ErrorKind::Unsupported)?;
    refused("unfold", cx.store.unfold(&key, &id).await, ErrorKind::Unsupported)
}

async fn no_take<S: Store>(cx: Cx<S>) -> Seen {
    let got = cx.store.take(&cx.key("x"), 1, &cx.id("hold")).await;
    refused("take", got, ErrorKind::Unsupported)?;
    let got = cx.store.end_hold(&cx.key("x"), &cx.id("hold"), End::Back).await;
    refused("end_hold", got, ErrorKind::Unsupported)?;
    refused("holds", cx.store.holds(&cx.key("x"), None).await, ErrorKind::Unsupported)
}

async fn no_tokens<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("x"), cx.id("id"));
    let pushed = cx.store.push_tokens(&key, &id, vec!["t".into()]).await;
    refused("push_tokens", pushed, ErrorKind::Unsupported)?;
    refused("pop_token", cx.store.pop_token(&key, &id).await, ErrorKind::Unsupported)?;
    refused("count_tokens", cx.store.count_tokens(&key).await, ErrorKind::Unsupported)
}

async fn no_publish<S: Store>(cx: Cx<S>) -> Seen {
    let got = cx.store.publish(&cx.key("x"), "m".into()).await;
    refused("publish", got, ErrorKind::Unsupported)?;
    refused("subscribe", cx.store.subscribe(&cx.key("x")).await, ErrorKind::Unsupported)
}

async fn no_replica<S: Store>(cx: Cx<S>) -> Seen {
    refused("get_replica", cx.store.get_replica(&cx.key("x")).await, ErrorKind::Unsupported)
}

async fn no_shard<S: Store>(cx: Cx<S>) -> Seen {
    same("shard_of", &cx.store.shard_of(&cx.key("x")), &None)
}

async fn cas_expected<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("expected");
    let some = |s: &'static str| Some(Bytes::from(s));
    for (expected, value, want, left) in [
        (some("a"), "b", false, None),
        (None, "a", true, some("a")),
        (None, "c", false, some("a")),
        (some("x"), "c", false, some("a")),
        (some("a"), "", true, some("")),
        (None, "c", false, some("")),
        (some(""), "d", true, some("d")),
    ] {
        let what = format!("{expected:?} → {value:?}");
        let set = cx.store.compare_and_set(&key, expected, value.into(), None).await;
        same(&what, &ok(&what, set)?, &want)?;
        same(&what, &cx.bytes(&key).await?, &left)?;
    }
    clean(&cx, &key).await;
    Ok(())
}

async fn cas_ttl<S: Store>(cx: Cx<S>) -> Seen {
    let (key, ttl) = (cx.key("ttl"), cx.ttl);
    let set = cx.store.compare_and_set(&key, None, "1".into(), Some(ttl)).await;
    same("set", &ok("compare_and_set", set)?, &true)?;
    cx.sleep(ttl + ttl / 2).await;
    same("after its ttl", &cx.bytes(&key).await?, &None)
}

async fn cas_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("race");
    let of = key.clone();
    let sets = cx
        .together(8, move |cx, i| {
            let key = of.clone();
            async move { cx.store.compare_and_set(&key, None, i.to_string().into(), None).await }
        })
        .await?;
    let mut won = 0;
    for set in sets {
        won += usize::from(ok("compare_and_set", set)?);
    }
    clean(&cx, &key).await;
    same("winners", &won, &1)
}

async fn cas_loop<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("loop");
    let of = key.clone();
    let done = cx
        .together(4, move |cx, _| {
            let key = of.clone();
            async move {
                let mut left = 10;
                while left > 0 {
                    let old = cx.bytes(&key).await?;
                    let text = old.clone().unwrap_or_else(|| "0".into());
                    let n: u64 = String::from_utf8_lossy(&text).parse().unwrap_or(0);
                    let new = (n + 1).to_string().into();
                    let set = cx.store.compare_and_set(&key, old, new, None).await;
                    left -= usize::from(ok("compare_and_set", set)?);
                }
                Ok::<(), String>(())
            }
        })
        .await?;
    done.into_iter().collect::<Seen>()?;
    let total = cx.bytes(&key).await?;
    clean(&cx, &key).await;
    same("the sum", &total, &Some("40".into()))
}

async fn put_at<S: Store>(cx: &Cx<S>, key: &Key, inc: u64, seq: u64) -> Result<bool, String> {
    let (version, bytes) = (Version { incarnation: inc, seq }, format!("{inc}.{seq}"));
    ok("put_if_newer", cx.store.put_if_newer(key, version, bytes.into(), None).await)
}

async fn newer_order<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("order");
    for (seq, want) in [(5, true), (5, false), (4, false), (6, true), (1, false), (6, false)] {
        same("applied", &put_at(&cx, &key, 1, seq).await?, &want)?;
    }
    let got = ok("get", cx.store.get(&key).await)?.ok_or("the value is absent")?;
    same("get", &got.bytes, &"1.6".into())?;
    if let Some(version) = got.version {
        same("version", &version, &Version { incarnation: 1, seq: 6 })?;
    }
    clean(&cx, &key).await;
    Ok(())
}

async fn newer_incarnation<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("incarnation");
    // Numbers beyond 2^53 catch a store that compares them as floating point.
    let big = u64::MAX - 1;
    for (inc, seq, want) in [
        (1, big, true),
        (1, big - 1, false),
        (1, big + 1, true),
        (2, 0, true),
        (1, big + 1, false),
        (big, 1, true),
        (big - 1, 2, false),
    ] {
        same(&format!("{inc}.{seq}"), &put_at(&cx, &key, inc, seq).await?, &want)?;
    }
    same("get", &cx.bytes(&key).await?, &Some(format!("{big}.1").into()))?;
    clean(&cx, &key).await;
    Ok(())
}

async fn newer_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("race");
    let of = key.clone();
    let puts = cx
        .together(16, move |cx, i| {
            let key = of.clone();
            async move { put_at(&cx, &key, 1, (i as u64 * 7) % 16).await }
        })
        .await?;
    puts.into_iter().collect::<Result<Vec<bool>, String>>()?;
    same("get", &cx.bytes(&key).await?, &Some("1.15".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

async fn newer_ttl<S: Store>(cx: Cx<S>) -> Seen {
    let (key, ttl) = (cx.key("ttl"), cx.ttl);
    let put = cx.store.put_if_newer(&key, Version::seq(9), "x".into(), Some(ttl)).await;
    same("applied", &ok("put_if_newer", put)?, &true)?;
    cx.sleep(ttl + ttl / 2).await;
    same("after its ttl", &cx.bytes(&key).await?, &None)?;
    same("an older one", &put_at(&cx, &key, 0, 1).await?, &true)?;
    clean(&cx, &key).await;
    Ok(())
}

async fn newer_plain<S: Store>(cx: Cx<S>) -> Seen {
    let (key, count) = (cx.key("plain"), cx.key("count"));
    for _ in 0..3 {
        ok("put", cx.store.put(&key, "plain".into(), None).await)?;
        ok("add", cx.store.add(&count, 5).await)?;
    }
    same("over a put", &put_at(&cx, &key, 0, 1).await?, &true)?;
    same("over an add", &put_at(&cx, &count, 0, 1).await?, &true)?;
    same("the order holds", &put_at(&cx, &key, 0, 1).await?, &false)?;
    same("and goes on", &put_at(&cx, &key, 7, 7).await?, &true)?;
    ok("put", cx.store.put(&key, "plain".into(), None).await)?;
    same("get", &cx.bytes(&key).await?, &Some("plain".into()))?;
    same("a put has ended the order", &put_at(&cx, &key, 0, 1).await?, &true)?;
    clean(&cx, &key).await;
    clean(&cx, &count).await;
    Ok(())
}

async fn lane_claim<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("claim");
    let first = ok("claim_lane", cx.store.claim_lane(&key).await)?;
    let inc = first.version.ok_or("the claim has no version")?.incarnation;
    same("bytes of a new lane", &first.bytes, &Bytes::new())?;
    same("its first write", &put_at(&cx, &key, inc, 1).await?, &true)?;
    let second = ok("claim_lane", cx.store.claim_lane(&key).await)?;
    same("bytes", &second.bytes, &format!("{inc}.1").into())?;
    let raised = second.version.ok_or("the claim has no version")?.incarnation;
    same("incarnation", &raised, &(inc + 1))?;
    same("the old writer", &put_at(&cx, &key, inc, 1_000).await?, &false)?;
    same("the new writer", &put_at(&cx, &key, raised, 1).await?, &true)?;
    clean(&cx, &key).await;
    Ok(())
}

async fn lane_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("race");
    let of = key.clone();
    let claims = cx
        .together(8, move |cx, _| {
            let key = of.clone();
            async move { cx.store.claim_lane(&key).await }
        })
        .await?;
    let mut seen = Vec::new();
    for claim in claims {
        seen.push(ok("claim_lane", claim)?.version.map(|v| v.incarnation));
    }
    seen.sort_unstable();
    seen.dedup();
    clean(&cx, &key).await;
    same("different incarnations", &seen.len(), &8)
}

async fn version_grows<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("grows");
    let mut last = None;
    for _ in 0..3 {
        ok("put", cx.store.put(&key, "x".into(), None).await)?;
        let version = ok("get", cx.store.get(&key).await)?.and_then(|s| s.version);
        same("a later version", &(version > last), &true)?;
        last = version;
    }
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_closes<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("closes");
    ok("add", cx.store.add(&key, 7).await)?;
    same("total", &ok("seal", cx.store.seal(&key, 1).await)?, &7)?;
    refused("add", cx.store.add(&key, 1).await, ErrorKind::Sealed)?;
    same("get", &cx.bytes(&key).await?, &Some("7".into()))?;
    let many = cx.store.get_many(std::slice::from_ref(&key)).await.remove(0);
    let many = ok("get_many", many)?;
    same("get_many", &many.as_ref().map(|s| s.bytes.clone()), &Some("7".into()))?;
    same("get_many says sealed", &many.map(|s| s.sealed), &Some(true))?;
    let one = ok("get", cx.store.get(&key).await)?;
    same("get says sealed", &one.map(|s| s.sealed), &Some(true))?;
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_twice<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("twice");
    ok("add", cx.store.add(&key, -7).await)?;
    for _ in 0..2 {
        same("total", &ok("seal", cx.store.seal(&key, u64::MAX).await)?, &-7)?;
    }
    refused("another tag", cx.store.seal(&key, 2).await, ErrorKind::Sealed)?;
    same("get", &cx.bytes(&key).await?, &Some("-7".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_open<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("open");
    ok("add", cx.store.add(&key, 7).await)?;
    same("not sealed", &ok("open", cx.store.open(&key, 1).await)?, &false)?;
    ok("seal", cx.store.seal(&key, 1).await)?;
    same("another tag", &ok("open", cx.store.open(&key, 2).await)?, &false)?;
    refused("add", cx.store.add(&key, 1).await, ErrorKind::Sealed)?;
    same("its tag", &ok("open", cx.store.open(&key, 1).await)?, &true)?;
    same("add", &ok("add", cx.store.add(&key, 1).await)?, &8)?;
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_absent<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("absent");
    same("total", &ok("seal", cx.store.seal(&key, 1).await)?, &0)?;
    refused("add", cx.store.add(&key, 1).await, ErrorKind::Sealed)?;
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_wrong<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("wrong");
    ok("put", cx.store.put(&key, "hello".into(), None).await)?;
    refused("seal", cx.store.seal(&key, 1).await, ErrorKind::WrongType)?;
    same("get", &cx.bytes(&key).await?, &Some("hello".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

async fn seal_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("race");
    let of = key.clone();
    let outcomes = cx
        .together(9, move |cx, i| {
            let key = of.clone();
            async move {
                if i == 4 {
                    return cx.store.seal(&key, 1).await.map(|total| (0, total));
                }
                let mut acked = 0;
                loop {
                    match cx.store.add(&key, 1).await {
                        Ok(_) if acked < 200 => acked += 1,
                        Ok(_) => return Ok((acked + 1, -1)),
                        Err(e) if e.kind() == ErrorKind::Sealed => return Ok((acked, -1)),
                        Err(e) => return Err(e),
                    }
                }
            }
        })
        .await?;
    let all = ok("add or seal", outcomes.into_iter().collect::<Result<Vec<_>, Error>>())?;
    let acked: i64 = all.iter().map(|(acked, _)| acked).sum();
    let sealed = all.iter().map(|(_, total)| *total).max();
    clean(&cx, &key).await;
    same("acknowledged adds and the sealed total", &Some(acked), &sealed)
}
