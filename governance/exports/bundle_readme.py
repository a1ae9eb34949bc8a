"""The README inside a bundle, for whoever opens it without knowing Penstock."""

README_TEXT = """\
PENSTOCK EVIDENCE BUNDLE
========================

What this is
  Entries of an append-only log, with the proof that each stands in the log at its place, the signed head of
  that log, measurements taken over them, and exports. Entries hold digests, counts and times; they hold no
  prompt and no answer.

How to check it (no network, no Penstock; Python 3.10 or later)
  1. python -m pip install cryptography
  2. Take verify.py from a source that you trust, or out of this bundle after reading it:
       python -m zipfile -e BUNDLE.zip unpacked
  3. python unpacked/verify.py BUNDLE.zip --key "VKEY"
     VKEY is the verifier key that the organization gave you by another way than this bundle. Without --key
     the key in vkey.txt is used and its fingerprint printed: compare it with the one you were given. A bundle
     that somebody else made and signed with a key of his own is found in no other way.
  4. Have you an earlier bundle of the same log? Add: --since EARLIER.zip
     This shows that nothing recorded then has been rewritten or removed since.
  Changing one byte anywhere in BUNDLE.zip makes the check fail and name the place.

What it does not show
  That an entry was true when it was written; only that it has not been changed since the head was signed.
  That the figures in measurements.json and exports/ follow from the entries: they are the signer's statement.

Files
  manifest.json         size and SHA-256 of every file
  statement.dsse.json   in-toto statement about the manifest, signed (DSSE, Ed25519)
  checkpoint.txt        signed head of the log (C2SP tlog-checkpoint)
  vkey.txt              verifier key of the signer (C2SP signed-note)
  leaves.jsonl          entries (RFC 8785 JSON), their index, and their inclusion proofs (RFC 9162)
  consistency/          earlier signed heads, with proofs that they are beginnings of this log (RFC 9162)
  measurements.json     figures, each with its window, count, unit and source
  exports/              files for people: workbooks, reports
  verify.py             the verifier


PENSTOCK 證據包
===============

這是什麼
  這裡是一份只能附加的日誌中的紀錄，附有每一筆紀錄確實位於日誌中該位置的證明、日誌已簽署的檢查點、據以計算的
  量測值，以及匯出檔。紀錄只含摘要值、計數與時間，不含任何提示詞或回答。

如何查驗（不需網路，也不需 Penstock；Python 3.10 以上）
  1. python -m pip install cryptography
  2. 從您信任的來源取得 verify.py，或讀過之後使用本證據包內附的一份：
       python -m zipfile -e BUNDLE.zip unpacked
  3. python unpacked/verify.py BUNDLE.zip --key "VKEY" --lang zh-Hant
     VKEY 是該組織經由證據包以外的管道交給您的驗證金鑰。若不指定 --key，則使用 vkey.txt 內的金鑰並列出其指紋，
     請與您取得的指紋比對。若有人自行製作證據包並以自己的金鑰簽署，只有這個方法能發現。
  4. 手上有同一份日誌較早的證據包嗎？請加上：--since EARLIER.zip
     這能證明當時的紀錄此後未被改寫或移除。
  BUNDLE.zip 中任何一個位元組遭到更改，查驗都會失敗，並指出位置。

無法證明的事
  無法證明紀錄在寫入時是否屬實；只能證明自檢查點簽署之後未曾更改。
  無法證明 measurements.json 與 exports/ 中的數據確由這些紀錄算得：那是簽署者的聲明。

檔案
  manifest.json         每個檔案的大小與 SHA-256
  statement.dsse.json   關於清單的 in-toto 聲明，已簽署（DSSE、Ed25519）
  checkpoint.txt        日誌已簽署的檢查點（C2SP tlog-checkpoint）
  vkey.txt              簽署者的驗證金鑰（C2SP signed-note）
  leaves.jsonl          紀錄（RFC 8785 JSON）、其索引與納入證明（RFC 9162）
  consistency/          先前已簽署的檢查點，以及它們是本日誌開頭的證明（RFC 9162）
  measurements.json     各項數據，附期間、筆數、單位與來源
  exports/              供人閱讀的檔案：試算表、報告
  verify.py             查驗程式
"""
