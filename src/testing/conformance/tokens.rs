//! Tokens in lists: each handed out to one hold, each hold once.

use super::optional::clean;
use super::stock::all;
use super::{Cx, Seen, ok, same};
use crate::Error;
use crate::error::Result;
use crate::key::Key;
use crate::store::{End, Ended, Id, Popped, Store};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};

fn token(text: &'static str, left: u64) -> Popped {
    Popped::Token { token: text.into(), left }
}

/// A list of these tokens.
async fn filled<S: Store>(
    cx: &Cx<S>,
    name: &str,
    tokens: &[&'static str],
) -> std::result::Result<Key, String> {
    let key = cx.key(name);
    let tokens = tokens.iter().map(|t| Bytes::from_static(t.as_bytes())).collect();
    let pushed = ok("push_tokens", cx.store.push_tokens(&key, &cx.id("b"), tokens).await)?;
    same("push_tokens", &pushed, &true)?;
    Ok(key)
}

async fn counted<S: Store>(cx: &Cx<S>, key: &Key, want: u64) -> Seen {
    same("count_tokens", &ok("count_tokens", cx.store.count_tokens(key).await)?, &want)
}

pub(super) async fn tokens_pushed<S: Store>(cx: Cx<S>) -> Seen {
    counted(&cx, &cx.key("pushed"), 0).await?;
    let key = filled(&cx, "pushed", &["a", "b"]).await?;
    for (batch, tokens, want) in [("b", ["c", "d"], false), ("b2", ["e", "f"], true)] {
        let tokens = tokens.map(Bytes::from).to_vec();
        let pushed = ok("push_tokens", cx.store.push_tokens(&key, &cx.id(batch), tokens).await)?;
        same("push_tokens", &pushed, &want)?;
    }
    counted(&cx, &key, 4).await?;
    for (turn, want) in [(2, true), (2, false), (1, false), (3, true)] {
        let batch = Id::in_turn(cx.key("b"), turn);
        let pushed = cx.store.push_tokens(&key, &batch, vec!["g".into()]).await;
        same(&format!("push in turn {turn}"), &ok("push_tokens", pushed)?, &want)?;
    }
    counted(&cx, &key, 6).await?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn token_popped<S: Store>(cx: Cx<S>) -> Seen {
    let key = filled(&cx, "popped", &["a:1", "\u{1}b\r\n"]).await?;
    for (hold, want) in [
        ("h1", token("a:1", 1)),
        ("h1", token("a:1", 1)),
        ("h2", token("\u{1}b\r\n", 0)),
        ("h3", Popped::Empty),
        ("h1", token("a:1", 1)),
    ] {
        let got = ok("pop_token", cx.store.pop_token(&key, &cx.id(hold)).await)?;
        same("pop_token", &got, &want)?;
    }
    counted(&cx, &key, 0).await?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn token_back<S: Store>(cx: Cx<S>) -> Seen {
    let key = filled(&cx, "back", &["a", "b:2", "c"]).await?;
    let (a, b) = (cx.id("a"), cx.id("b"));
    ok("pop_token", cx.store.pop_token(&key, &a).await)?;
    ok("pop_token", cx.store.pop_token(&key, &b).await)?;
    for (hold, end, want) in [
        (&b, End::Back, Ended::Now { amount: 1 }),
        (&b, End::Back, Ended::Before { end: End::Back, amount: 1 }),
        (&b, End::Sold, Ended::Before { end: End::Back, amount: 1 }),
        (&a, End::Sold, Ended::Now { amount: 1 }),
        (&a, End::Back, Ended::Before { end: End::Sold, amount: 1 }),
    ] {
        same("end_hold", &ok("end_hold", cx.store.end_hold(&key, hold, end).await)?, &want)?;
    }
    counted(&cx, &key, 2).await?;
    for (hold, want) in [
        (b, Popped::Ended { held: true }),
        (a, token("a", 2)),
        (cx.id("h3"), token("c", 1)),
        (cx.id("h4"), token("b:2", 0)),
        (cx.id("h5"), Popped::Empty),
    ] {
        let got = ok("pop_token", cx.store.pop_token(&key, &hold).await)?;
        same("pop_token", &got, &want)?;
    }
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn token_barred<S: Store>(cx: Cx<S>) -> Seen {
    let key = filled(&cx, "barred", &["a"]).await?;
    let late = cx.id("late");
    let never = ok("end_hold", cx.store.end_hold(&key, &late, End::Sold).await)?;
    same("using up what was never held", &never, &Ended::Never)?;
    let ended = ok("end_hold", cx.store.end_hold(&key, &late, End::Back).await)?;
    same("end_hold", &ended, &Ended::Now { amount: 0 })?;
    let got = ok("pop_token", cx.store.pop_token(&key, &late).await)?;
    same("pop_token after it", &got, &Popped::Ended { held: false })?;
    counted(&cx, &key, 1).await?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn tokens_told<S: Store>(cx: Cx<S>) -> Seen {
    let key = filled(&cx, "told", &["a", "b:2", "c"]).await?;
    let mut want = BTreeMap::new();
    for (hold, end, token) in [
        ("h1", Some(End::Sold), Some("a")),
        ("h2", None, Some("b:2")),
        ("h3", Some(End::Back), None),
    ] {
        let hold = cx.id(hold);
        ok("pop_token", cx.store.pop_token(&key, &hold).await)?;
        if let Some(end) = end {
            ok("end_hold", cx.store.end_hold(&key, &hold, end).await)?;
        }
        want.insert(hold.name, (1, end, token.map(Bytes::from)));
    }
    let told =
        all(&cx, &key).await?.into_iter().map(|h| (h.id, (h.amount, h.ended, h.token))).collect();
    same("holds", &told, &want)?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn token_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = filled(&cx, "race", &["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]).await?;
    let of = key.clone();
    let popped = cx
        .together(8, move |cx, i| {
            let key = of.clone();
            async move {
                let mut tokens = Vec::new();
                for n in 0..4 {
                    let got = cx.store.pop_token(&key, &cx.id(&format!("r{i}.{n}"))).await?;
                    if let Popped::Token { token, .. } = got {
                        tokens.push(token);
                    }
                }
                Ok(tokens)
            }
        })
        .await?;
    let popped = ok("pop_token", popped.into_iter().collect::<Result<Vec<_>, Error>>())?;
    let all: Vec<Bytes> = popped.into_iter().flatten().collect();
    clean(&cx, &key).await;
    same("tokens handed out", &all.len(), &10)?;
    same("different tokens", &all.iter().collect::<BTreeSet<_>>().len(), &10)
}
